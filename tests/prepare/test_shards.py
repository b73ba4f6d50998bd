"""Tokenising, special ids, dtypes, merging, the commands."""

import math

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.indexed import IndexedDataset, IndexedWriter
from titan_like.data.manifest import Manifest, expand_prefix
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare import shards
from titan_like.prepare.config import load_prepare_config
from titan_like.prepare.main import main
from titan_like.prepare.shards import Vocabulary, count_tokens, entropy_nats, write_shard


def vocabulary(model, **settings):
    return Vocabulary(model, load_prepare_config([f"--{key.replace('__', '.')}={v}" for key, v in settings.items()]))


@pytest.mark.parametrize(("eod", "bos"), [(True, False), (False, False), (True, True), (False, True)])
def test_r018_lengths_agree_with_the_tokens(tmp_path, model, eod, bos):
    texts = ["a", "some more words", "x" * 50]
    vocab = vocabulary(model, output__append_eod=eod, output__bos=bos)
    manifest = write_shard(tmp_path / "x", enumerate(texts), vocab, "here", {})
    data, tokenizer = IndexedDataset(tmp_path / "x"), Tokenizer(model)
    expected = [[1] * bos + tokenizer.encode(text) + [2] * eod for text in texts]
    assert [data.read(i).tolist() for i in range(3)] == expected
    assert (tmp_path / "x.bin").stat().st_size == 2 * sum(map(len, expected))
    assert manifest.tokens == sum(map(len, expected))
    assert (manifest.append_eod, manifest.add_bos, manifest.eod_id, manifest.bos_id) == (eod, bos, 2, 1)


def test_r019_a_dtype_that_cannot_hold_an_id_is_an_error_that_names_it(tmp_path, model):
    vocab = vocabulary(model, output__dtype="uint16")
    vocab.encode = lambda texts, threads: ([np.array([int(text)])] for text in texts)
    with pytest.raises(ConfigError, match=r"document 2 of .* token id 70000, which uint16 .*\(third\)"):
        write_shard(tmp_path / "x", [("first", "1"), ("second", "65535"), ("third", "70000")], vocab, "", {})
    assert list(tmp_path.iterdir()) == []


def test_special_ids_by_id_and_token(model):
    vocab = vocabulary(model, tokenizer__eod="<unk>", tokenizer__pad=5)
    assert (vocab.eod_id, vocab.bos_id, vocab.pad_id) == (0, 1, 5)
    for wrong in ("<nope>", 300, -2):
        with pytest.raises(ConfigError, match=r"tokenizer\.eod: .*is no token of .*ids 0 to 299"):
            vocabulary(model, tokenizer__eod=wrong)


def test_long_documents_are_tokenised_in_parts(tmp_path, model, monkeypatch):
    monkeypatch.setattr(shards, "LONGEST_CHARACTERS", 50)
    texts = ["the quick brown fox\n" * 10, "x" * 120, "a b " * 40, "short"]
    write_shard(tmp_path / "x", enumerate(texts), vocabulary(model), "", {})
    data, tokenizer = IndexedDataset(tmp_path / "x"), Tokenizer(model)
    assert [tokenizer.decode(data.read(i)[:-1]) for i in range(4)] == texts
    assert next(shards._parts("ab\ncd" * 20)) == ("ab\ncd" * 9 + "ab", False)  # cut at the last line end


def test_entropy():
    assert entropy_nats(np.array([1, 1, 0, 2])) == pytest.approx(1.5 * math.log(2))  # 2 * 1/4 ln 4 + 1/2 ln 2
    assert entropy_nats(np.array([0, 7])) == 0


def test_an_id_above_the_vocabulary_names_the_document(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for ids in ([1, 2], [3], [4, 300, 5]):
            writer.add_document(ids)
    with pytest.raises(ConfigError, match=r"document 2 of .*x has the token id 300.*0 to 299"):
        count_tokens(IndexedDataset(tmp_path / "x"), 300)
    assert count_tokens(IndexedDataset(tmp_path / "x"), 301)[[1, 300]].tolist() == [1, 1]


def test_merge(shop, capsys):
    shop.run(shop.jsonl("a.jsonl", "one", "two", "three"), output__shards=2)
    shop.run(shop.jsonl("b.jsonl", "four"), out="other")
    merged = shop.folder / "merged" / "all"
    assert main(["merge", f"{shop.out}/train", f"{shop.folder}/other/train", "--output", str(merged)]) == 0
    assert shop.texts("all", out="merged") == ["one", "two", "three", "four"]
    parts = [*expand_prefix(shop.out / "train"), f"{shop.folder}/other/train"]
    content = b"".join(open(f"{part}.bin", "rb").read() for part in parts)  # noqa: SIM115
    assert (shop.folder / "merged" / "all.bin").read_bytes() == content
    assert Manifest.load(merged).source.count("jsonl") == 2
    assert main(["merge", f"{shop.out}/train", "--output", str(merged)]) == 2
    assert "all.bin exists" in capsys.readouterr().err
    shop.run(shop.jsonl("c.jsonl", "x"), out="bos", output__bos=True)
    assert main(["merge", f"{shop.out}/train", f"{shop.folder}/bos/train", f"--output={shop.folder}/y"]) == 2
    assert "differ in add_bos" in capsys.readouterr().err


def test_merge_of_foreign_shards_keeps_their_documents(tmp_path, capsys):
    for name, documents in (("a", [[1], [2, 3]]), ("b", [[4]])):
        with IndexedWriter(tmp_path / name, np.int32) as writer:
            for ids in documents:
                writer.add_document(ids)
    assert main(["merge", f"{tmp_path}/a", f"{tmp_path}/b", f"--output={tmp_path}/c"]) == 0
    assert "has none" in capsys.readouterr().err
    data = IndexedDataset(tmp_path / "c")
    assert [data.read(i).tolist() for i in range(3)] == [[1], [2, 3], [4]]
    assert data.document_indices.tolist() == [0, 1, 2, 3] and Manifest.load(tmp_path / "c") is None


def test_a_missing_shard_of_a_series_is_named(shop):
    shop.run(shop.jsonl("a.jsonl", "one", "two", "three"), output__shards=3)
    assert [p[-5:] for p in expand_prefix(shop.out / "train")] == ["00000", "00001", "00002"]
    (shop.out / "train_00002.idx").unlink()
    with pytest.raises(ConfigError, match=r"train_00002\.idx is missing, one of 3 shards"):
        expand_prefix(shop.out / "train")


def test_inspect(shop, capsys):
    shop.run(shop.jsonl("a.jsonl", "one", "two", "three"))
    assert main(["inspect", f"{shop.out}/train", "--documents", "2", "--verify"]) == 0
    said = capsys.readouterr().out
    assert "'one'" in said and "'two'" in said and "'three'" not in said and '"vocab_size": 300' in said
    assert "agree with the manifest" in said
    with open(f"{shop.out}/train.bin", "r+b") as file:
        file.write(b"\x09\x00")
    assert main(["inspect", f"{shop.out}/train"]) == 0  # sizes alone
    assert main(["inspect", f"{shop.out}/train", "--verify"]) == 2
    assert "train.bin is not the file" in capsys.readouterr().err
    (shop.out / "train.manifest.json").unlink()
    assert main(["inspect", f"{shop.out}/train", "--documents", "1"]) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "document 0: " in captured.out
    assert main(["inspect", f"{shop.out}/absent"]) == 2
    assert main(["inspect", f"{shop.out}/train", "--verfy"]) == 2


def test_train_tokenizer(shop, capsys):
    path = shop.jsonl("a.jsonl", *["def area(width, height):\n    return width * height\n"] * 50)
    model = shop.folder / "new" / "t.model"
    assert main(["train-tokenizer", path, "--output", str(model), "--vocab_size", "285"]) == 0
    assert Tokenizer(model).vocab_size == 285
    assert main(["train-tokenizer", path, "--output", str(model)]) == 2
    assert main(["train-tokenizer", path, "--output", f"{model}2", "--vocab_size", "50000"]) == 2
    assert "vocab_size 50000" in capsys.readouterr().err
    assert [p.name for p in model.parent.iterdir()] == ["t.model"]


def test_run_reports_settings_without_loading_anything(capsys):
    assert main(["run", "--output.shrads", "3"]) == 2
    assert "did you mean output.shards?" in capsys.readouterr().err
