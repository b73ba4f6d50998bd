import base64
import importlib.util
import io
import json
import random
from pathlib import Path

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


PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = ["", "Hello world", "  def f(x):\n\treturn x\n", "naïve Ω 漢字 \N{GRINNING FACE}", "<|end|></s><s>[INST] <unk>"]


def package_file(package, *parts):
    found = importlib.util.find_spec(package)  # the package itself is heavy and is not imported
    path = Path(found.submodule_search_locations[0], *parts) if found else Path("absent")
    return path if path.exists() else pytest.skip(f"{package} is not installed")


def test_a_small_tokenizer_json(tmp_path):
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    made.train_from_iterator([CODE], trainer)
    made.post_processor = library.processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(tmp_path / "tokenizer.json")
    assert (found.vocab_size, found.eos_id, found.id_of("<|end|>"), found.package) == (280, -1, 0, "tokenizers")
    assert [found.decode(ids) for ids in found.encode_batch(TEXTS)] == TEXTS
    assert found.encode_batch(TEXTS) == [found.encode(text) for text in TEXTS]
    assert 0 not in found.encode("<|end|>")  # neither added nor read out of the text
    assert found.decode([0, *found.encode("def")]) == "def"
    with pytest.raises(ConfigError, match="lone surrogate"):
        found.encode_batch(["x", "a\ud800"])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json is no Hugging Face"):
        Tokenizer(tmp_path / "broken.json")


def test_a_small_tiktoken_file(tmp_path):
    pytest.importorskip("tiktoken")
    path = tmp_path / "x.tiktoken"
    tokens = [bytes([i]) for i in range(256)] + [b"he", b"hello"[:3]]
    path.write_bytes(b"".join(base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(tokens)))
    with pytest.raises(ConfigError, match=r"cannot read .*x\.tiktoken\.json: .*pattern"):
        Tokenizer(path)
    beside = tmp_path / "x.tiktoken.json"
    beside.write_text(json.dumps({"pattern": PATTERN, "special_tokens": {"<|end|>": 258}}))
    found = Tokenizer(path)
    assert (found.vocab_size, found.id_of("<|end|>"), found.files) == (259, 258, [str(path), str(beside)])
    assert found.encode("hello") == [257, ord("l"), ord("o")]
    assert [found.decode(ids) for ids in found.encode_batch(TEXTS)] == TEXTS
    assert 258 not in found.encode("<|end|>") and found.decode([258, 256]) == "he"
    with pytest.raises(ConfigError, match="lone surrogate"):
        found.encode_batch(["x", "a\ud800"])
    path.write_bytes(b"no ranks\n")
    with pytest.raises(ConfigError, match=r"x\.tiktoken\.json is damaged"):
        Tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral(name):
    found = Tokenizer(package_file("mistral_common", "data", name))
    assert (found.vocab_size, found.bos_id, found.eos_id) == (32768 if name.endswith("v3") else 32000, 1, 2)
    for text in TEXTS[1:]:
        assert found.decode(found.encode(text)) == text
        assert not {0, 1, 2} & set(found.encode(text))


def test_deepseek_has_more_ids_than_16_bits(tmp_path):
    pytest.importorskip("tokenizers")
    found = Tokenizer(package_file("litellm", "litellm_core_utils", "tokenizers", "deepseek_tokenizer.json"))
    assert found.vocab_size > 65536
    assert [found.decode(ids) for ids in found.encode_batch(TEXTS)] == TEXTS
    eos = found.id_of("<\uff5cend\u2581of\u2581sentence\uff5c>")
    assert eos not in found.encode("<\uff5cend\u2581of\u2581sentence\uff5c>")


def test_qwen(tmp_path):
    pytest.importorskip("tiktoken")
    path = tmp_path / "qwen.tiktoken"
    path.write_bytes(package_file("dashscope", "resources", "qwen.tiktoken").read_bytes())
    settings = {"pattern": PATTERN, "special_tokens": {"<|endoftext|>": 151643}}
    (tmp_path / "qwen.tiktoken.json").write_text(json.dumps(settings))
    found = Tokenizer(path)
    assert found.vocab_size == 151644 and found.id_of("<|endoftext|>") == 151643
    assert [found.decode(ids) for ids in found.encode_batch(TEXTS)] == TEXTS
