"""Text to token ids and back: SentencePiece models, Hugging Face tokenizer.json and tiktoken files behind one class.

The packages tokenizers and tiktoken are imported when such a file is opened.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from titan_like.config.errors import ConfigError

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character inside pieces


class Backend(Protocol):
    """What a tokenizer library has to do. Text that looks like a special token is text; nothing is added."""

    vocab_size: int  # ids are 0 .. vocab_size - 1
    special: dict[str, int]  # "bos", "eos", "pad" where the file itself says which they are
    package: str

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def id_of(self, token: str) -> int | None: ...


class Tokenizer:
    """A tokenizer that adds no BOS or EOS by itself.

    Args:
        path: SentencePiece .model, tokenizer.json, or X.tiktoken with X.tiktoken.json beside it that holds
            {"pattern": the regular expression that cuts text, "special_tokens": {token: id}}.
    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        bos_id, eos_id, pad_id: -1 where the file does not say which they are.
        sha256: of the file, hexadecimal.
        files: all files of the tokenizer.
        package: name of the library.
    Raises:
        ConfigError: the file is missing, damaged or of another kind, or its library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read the tokenizer {path}: {error.strerror}; "
                "give the path of a SentencePiece .model, a tokenizer.json or a .tiktoken file"
            ) from error
        self.path = str(path)
        self.files = [self.path]
        self.sha256 = hashlib.sha256(content).hexdigest()
        if self.path.endswith(".json"):
            self._backend: Backend = _HuggingFace(self.path, content)
        elif self.path.endswith(".tiktoken"):
            self._backend = _Tiktoken(self.path, content)
            self.files.append(f"{path}.json")
        else:
            self._backend = _SentencePiece(self.path, content)
        self.package = self._backend.package
        self.vocab_size = self._backend.vocab_size
        self.bos_id, self.eos_id, self.pad_id = (self._backend.special.get(name, -1) for name in ("bos", "eos", "pad"))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; errors as for `encode_batch`."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int = -1) -> list[list[int]]:
        """Ids of each text, on all cores (threads=-1) or on so many.

        A tokenizer.json is encoded by all cores or one (threads=1): its library has one pool of threads per process.

        Raises:
            ConfigError: a text holds a lone surrogate, which UTF-8 cannot express.
        """
        texts = list(texts)
        try:
            return self._backend.encode_batch(texts, threads if threads > 0 else os.cpu_count() or 1)
        except (TypeError, UnicodeError) as error:
            wrong = [text for text in texts if any("\ud800" <= character <= "\udfff" for character in text)]
            if not wrong:
                raise
            raise ConfigError(f"{wrong[0][:40]!r} is not valid Unicode (a lone surrogate); remove it") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special tokens have none.

        Raises:
            ConfigError: an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ConfigError(
                f"token id {wrong[0]} is not in the vocabulary of {self.path} (0 to {self.vocab_size - 1})"
            )
        return self._backend.decode(ids)

    def id_of(self, token: int | str) -> int:
        """An id that is given as itself or by its token.

        Raises:
            ConfigError: it is not in the vocabulary.
        """
        found = token if isinstance(token, int) else self._backend.id_of(token)
        if found is None or not 0 <= found < self.vocab_size:
            raise ConfigError(f"{token!r} is no token of {self.path}, which has the ids 0 to {self.vocab_size - 1}")
        return found


class _SentencePiece:
    """With byte fallback and no dummy prefix, as `titan-prepare` makes them, every text comes back exactly."""

    package = "sentencepiece"

    def __init__(self, path: str, content: bytes) -> None:
        import sentencepiece

        self._sp = sentencepiece.SentencePieceProcessor()
        try:
            loaded = bool(content) and self._sp.LoadFromSerializedProto(content)
        except RuntimeError:
            loaded = False
        if not loaded:
            raise ConfigError(f"the tokenizer {path} is no SentencePiece model or is damaged; copy or train it again")
        self.vocab_size: int = self._sp.vocab_size()
        ids = {"bos": self._sp.bos_id(), "eos": self._sp.eos_id(), "pad": self._sp.pad_id()}
        self.special = {name: i for name, i in ids.items() if i >= 0}
        self._mark_ids = self._byte_ids_of_mark()

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        ids: list[list[int]] = self._sp.encode(list(texts), num_threads=threads)
        if self._mark_ids:
            for i, text in enumerate(texts):
                if SPACE_MARK in text:
                    ids[i] = self._encode_with_marks(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._sp.decode(list(ids)))

    def id_of(self, token: str) -> int | None:
        found = self._sp.piece_to_id(token)
        return found if self._sp.id_to_piece(found) == token else None

    def _byte_ids_of_mark(self) -> list[int]:
        """The byte pieces that spell SPACE_MARK, empty if the model has none or adds a dummy prefix to each text."""
        ids = [self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        has_prefix = self._sp.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        return [] if has_prefix or not all(map(self._sp.is_byte, ids)) else ids

    def _encode_with_marks(self, text: str) -> list[int]:
        """SentencePiece would read the character itself as a space; spelt in bytes it survives."""
        parts: list[list[int]] = self._sp.encode(text.split(SPACE_MARK))
        ids = parts[0]
        for part in parts[1:]:
            ids = ids + self._mark_ids + part
        return ids


class _HuggingFace:
    package = "tokenizers"

    def __init__(self, path: str, content: bytes) -> None:
        library = _need(self.package, path)
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"the tokenizer {path} is no Hugging Face tokenizer.json or is damaged: {error}"
            ) from error
        self._tokenizer.encode_special_tokens = True  # "</s>" in a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.special: dict[str, int] = {}  # the file marks special tokens, but not which of them is EOS

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        if threads == 1:
            return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class _Tiktoken:
    package = "tiktoken"

    def __init__(self, path: str, content: bytes) -> None:
        library = _need(self.package, path)
        beside = f"{path}.json"
        try:
            settings = json.loads(Path(beside).read_text(encoding="utf-8"))
            ranks = _tiktoken_ranks(content)
            special = {str(token): int(i) for token, i in settings["special_tokens"].items()}
            self._encoding: Any = library.Encoding(
                path, pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens=special
            )
        except OSError as error:
            raise ConfigError(
                f"cannot read {beside}: {error.strerror}; a .tiktoken file holds no pattern: write there "
                '{"pattern": "...", "special_tokens": {"<|endoftext|>": 151643}}'
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the tokenizer {path} or {beside} is damaged: {error!r}") from error
        self._special_tokens, self._special_ids = special, frozenset(special.values())
        self.vocab_size = self._encoding.n_vocab
        self.special: dict[str, int] = {}

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        for text in texts:
            text.encode()  # tiktoken would replace a lone surrogate silently
        if threads == 1:
            return [self._encoding.encode_ordinary(text) for text in texts]
        found: list[list[int]] = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([i for i in ids if i not in self._special_ids]))

    def id_of(self, token: str) -> int | None:
        return self._special_tokens.get(token)


def _tiktoken_ranks(content: bytes) -> dict[bytes, int]:
    """Lines of "base64 rank"."""
    import binascii

    ranks: dict[bytes, int] = {}
    for line in content.splitlines():
        if line:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token)] = int(rank)
    if not ranks:
        raise ValueError("no lines")
    return ranks


def _need(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"the tokenizer {path} needs the package {package}; pip install {package}") from error
