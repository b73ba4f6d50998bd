"""transformers gets the ids that the class Tokenizer gets, from the files that are exported."""

import io
import json
import textwrap
from pathlib import Path

import pytest
import sentencepiece

from titan_like.config.errors import ConfigError
from titan_like.data.hf_tokenizer import export_tokenizer, sentencepiece_as_json, token_ids, tokenizer_of, twin
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.vocabulary import train_tokenizer

SOURCE = Path(textwrap.__file__).read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer([SOURCE], 600))
    return path


def test_transformers_gets_the_same_ids(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert export_tokenizer(model, tmp_path) == ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer(model)
    texts = [
        SOURCE, Path(json.__file__).read_text(), "", " ", "  two lead",
        "ä 中文 \U0001f642", "\n        x\n\n     y\t\tz \r\n", "<0x41> \u2028 aaaaaaaa      b",
    ]  # fmt: skip
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text == ours.decode(ids)
    assert len(theirs) == ours.vocab_size == 600
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, None)


def test_ids_of_special_tokens(model: Path, tmp_path: Path) -> None:
    assert token_ids(model) == {"bos_token_id": 1, "eos_token_id": 2}
    copy = tmp_path / "tokenizer.model"  # as in a Hugging Face folder: its config.json decides
    copy.write_bytes(model.read_bytes())
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 5], "vocab_size": 9}')
    assert token_ids(copy) == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": None}


def test_companions_are_copied(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(model.read_bytes())
    for name in ("tokenizer_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(name)
    assert export_tokenizer(source / "tokenizer.model", target) == [
        "tokenizer.model", "tokenizer_config.json", "chat_template.jinja",
    ]  # fmt: skip
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    assert twin(model, source) == source / "tokenizer.model" == tokenizer_of(source)
    (source / "tokenizer.model").write_bytes(b"another")
    assert twin(model, source) is None
    (source / "tokenizer.json").write_text("{}")
    assert tokenizer_of(source) == source / "tokenizer.json" and tokenizer_of(tmp_path) is None


def test_a_model_that_normalises_is_only_copied(tmp_path: Path) -> None:
    """A dummy prefix and NFKC are not in the tokenizer.json that is written, so none is."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.splitlines()), model_writer=buffer, model_type="bpe", vocab_size=400,
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    path = tmp_path / "nfkc.model"
    path.write_bytes(buffer.getvalue())
    assert sentencepiece_as_json(path) is None
    assert export_tokenizer(path, tmp_path / "out") == ["tokenizer.model"]


def test_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "ranks.tiktoken").write_text("IQ== 0")
    assert export_tokenizer(tmp_path / "mine.json", tmp_path / "out") == ["tokenizer.json"]
    assert export_tokenizer(tmp_path / "ranks.tiktoken", tmp_path / "out") == []
    with pytest.raises(ConfigError, match=r"cannot copy the tokenizer .*nowhere.model"):
        export_tokenizer(tmp_path / "nowhere.model", tmp_path / "out")
