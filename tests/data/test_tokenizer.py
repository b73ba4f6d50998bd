import io
import random

import pytest
import sentencepiece

from titan_like.config.errors import ConfigError
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.vocabulary import INDENT_PIECES, train_tokenizer

CODE = "def area(width, height):\n    if width:\n        return width * height\n\n    return 0\n\n\n" * 50


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer([CODE], 320))
    return Tokenizer(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  lead and trail  ",
        "\n\n\n",
        "\t\tif x:\r\n\t    y\n",
        CODE,
        "\n" + " " * 37 + "x",
        "naïve Ω 漢字 \N{GRINNING FACE} e\u0301 \ufb01 \u00a0\u3000 \ufeff",  # nothing is normalised
        "</s><s><unk> <0x0A> \u2581 \u2581\u2581x\u2581",  # looks like the tokenizer's own marks
        "\n\u2581\u2581\u2581\u2581",
        "\x01\x7f\x80",
    ],
)
def test_any_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_random_text_comes_back_exactly(tokenizer):
    rng = random.Random(0)
    alphabet = [" ", "\n", "\t", "\u2581", "d", "e", "f", "(", "\u0394", "\U0001f600", "<", "0", "x", ">"]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_line_end_with_indentation_is_one_token(tokenizer):
    assert len(INDENT_PIECES) == 5
    for width in (4, 8, 12, 16, 20):
        assert len(tokenizer.encode("\n" + " " * width)) == 1


def test_special_ids(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (320, 1, 2)
    assert tokenizer.decode([1, *tokenizer.encode("def"), 2]) == "def"
    assert len(tokenizer.sha256) == 64
    with pytest.raises(ConfigError, match="token id 320 "):
        tokenizer.decode([5, 320])


def test_a_lone_surrogate_is_no_text(tokenizer):
    with pytest.raises(ConfigError, match=r"'a\\ud800' is not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_a_foreign_model_with_a_dummy_prefix(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CODE]), model_writer=model, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, max_sentence_length=100_000,
    )  # fmt: skip
    (tmp_path / "x.model").write_bytes(model.getvalue())
    foreign = Tokenizer(tmp_path / "x.model")
    assert foreign.decode(foreign.encode("return width")) == "return width"


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"\x0a\xff\xff\xff\xff"])
def test_missing_or_damaged_model(tmp_path, content):
    path = tmp_path / "x.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.model"):
        Tokenizer(path)


def test_a_truncated_model(tokenizer, tmp_path):
    whole = open(tokenizer.path, "rb").read()  # noqa: SIM115
    (tmp_path / "x.model").write_bytes(whole[:-7])
    with pytest.raises(ConfigError, match=r"x\.model .*damaged"):
        Tokenizer(tmp_path / "x.model")
