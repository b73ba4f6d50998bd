"""A tokenizer's way into a Hugging Face folder, for transformers to load."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.data.tokenizer import SPACE_MARK, Tokenizer

# What may lie beside a tokenizer file and belongs to it.
COMPANIONS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
UNKNOWN, NORMAL, CONTROL, USER_DEFINED = 2, 1, 3, 4  # kinds of SentencePiece pieces


def tokenizer_of(folder: Path) -> Path | None:
    """The tokenizer file of a Hugging Face folder; tokenizer.json where there is one, since transformers reads that."""
    return next((path for name in COMPANIONS[:2] if (path := folder / name).is_file()), None)


def twin(path: Path, folder: Path) -> Path | None:
    """The tokenizer file of a Hugging Face folder that has the contents of `path`: its companions are there."""
    files = (folder / name for name in COMPANIONS[:2])
    return next((file for file in files if file.is_file() and file.read_bytes() == path.read_bytes()), None)


def token_ids(path: Path) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id as far as they are known: from a config.json beside the tokenizer,
    where it comes from a Hugging Face folder, else from the tokenizer itself.
    """
    beside = path.parent / "config.json"
    if path.name in COMPANIONS and beside.is_file():
        settings = json.loads(beside.read_text(encoding="utf-8"))
        found = {key: settings.get(key) for key in ID_KEYS}
        if any(value is not None for value in found.values()):
            return found
    tokenizer = Tokenizer(path)
    ids = dict(zip(ID_KEYS, (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id), strict=True))
    return {key: i for key, i in ids.items() if i >= 0}


def export_tokenizer(path: Path, folder: Path) -> list[str]:
    """Copy a tokenizer and its companions, or write the tokenizer.json of a SentencePiece model that has none.

    Returns: the names of the files, empty if transformers cannot use a tokenizer of this kind.
    Raises:
        ConfigError: it cannot be read or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.name in COMPANIONS:
            names = [name for name in COMPANIONS if (path.parent / name).is_file()]
            if path.parent.resolve() != folder.resolve():
                for name in names:
                    shutil.copyfile(path.parent / name, folder / name)
        elif path.suffix == ".json":
            names = ["tokenizer.json"]
            shutil.copyfile(path, folder / names[0])
        elif path.suffix == ".tiktoken":
            return []
        else:
            names = ["tokenizer.model"]
            shutil.copyfile(path, folder / names[0])
    except OSError as error:
        raise ConfigError(f"cannot copy the tokenizer {path} to {folder}: {error.strerror}") from error
    if names == ["tokenizer.model"] and (converted := sentencepiece_as_json(path)):
        tokenizer_json, tokenizer_config = converted
        _write(folder / "tokenizer.json", tokenizer_json)
        _write(folder / "tokenizer_config.json", tokenizer_config)
        names += ["tokenizer.json", "tokenizer_config.json"]
    return names


def sentencepiece_as_json(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """tokenizer.json and tokenizer_config.json of a SentencePiece BPE model that normalises nothing, None for others.

    Such models are what titan-prepare makes. A text that holds the character SPACE_MARK itself, or spells a special
    token, is the exception to equal ids: the class Tokenizer takes both as plain text, transformers does not.
    """
    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")

    model = proto.ModelProto.FromString(path.read_bytes())
    spec, normalizer = model.trainer_spec, model.normalizer_spec
    plain = (
        normalizer.name == "identity" and not normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces
    )
    if spec.model_type != proto.TrainerSpec.BPE or not plain or not spec.byte_fallback:
        return None
    pieces = list(model.pieces)
    added = [
        {
            "id": i, "content": piece.piece, "single_word": False, "lstrip": False, "rstrip": False,
            "special": piece.type != USER_DEFINED, "normalized": piece.type == USER_DEFINED,
        }
        for i, piece in enumerate(pieces)
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": pieces[spec.unk_id].piece, "fuse_unk": True,
            "byte_fallback": True, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "ignore_merges": False, "merges": _merges(pieces),
            "vocab": {piece.piece: i for i, piece in enumerate(pieces)},
        },
    }  # fmt: skip
    ids = {"unk": spec.unk_id, "bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id}
    names = {f"{kind}_token": pieces[i].piece for kind, i in ids.items() if i >= 0}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    return tokenizer, config


def _merges(pieces: list[Any]) -> list[list[str]]:
    """The pairs that make each piece, best piece first: SentencePiece makes the piece with the highest score."""
    normal = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    return [
        [piece[:cut], piece[cut:]]
        for piece in sorted(normal, key=lambda piece: -normal[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
