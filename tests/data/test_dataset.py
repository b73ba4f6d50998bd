import os
import struct

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.dataset import TokenDataset, check_data, expand, open_training_data
from titan_like.data.indexed import IndexedWriter
from titan_like.data.loader import BatchSource, evaluation_batches
from titan_like.data.manifest import Manifest, file_sha256


def shard(prefix, contents, dtype=np.uint16, **manifest):
    """A shard; with any manifest field given, a manifest too."""
    with IndexedWriter(prefix, dtype) as writer:
        for ids in contents:
            writer.add_document(ids)
    if manifest:
        fields = dict(
            tokenizer="tokenizer.model",
            tokenizer_sha256="aa",
            vocab_size=300,
            eod_id=2,
            documents=len(contents),
            tokens=sum(map(len, contents)),
            dtype="uint16",
            source="test",
            unigram_entropy_nats=1.0,
            settings={},
            versions={},
        )
        for suffix in ("bin", "idx"):
            path = f"{prefix}.{suffix}"
            fields |= {f"{suffix}_sha256": file_sha256(path), f"{suffix}_bytes": os.path.getsize(path)}
        Manifest(**(fields | manifest)).save(prefix)
    return str(prefix)


def test_several_prefixes_are_one_set_of_documents(tmp_path):
    a = shard(tmp_path / "a", [[1, 2, 3], [4]])
    b = shard(tmp_path / "b", [[70000, 6], [7, 8, 9]], np.int32)  # each shard has its own dtype
    data = TokenDataset([a, b], seq_len=4, seed=0, shuffle=False)
    assert len(data) == 2 and data.num_tokens == 9
    assert data[0].tolist() == [1, 2, 3, 4, 70000]
    assert data[1].tolist() == [70000, 6, 7, 8, 9]
    assert data[2].tolist() == data[0].tolist()
    assert data[0].dtype == np.int64
    assert data.manifests == [None, None]


def test_shuffled_samples_are_stretches_of_the_shuffled_documents(tmp_path):
    documents = [list(range(10 * d, 10 * d + d + 1)) for d in range(1, 8)]
    data = TokenDataset([shard(tmp_path / "a", documents)], seq_len=5, seed=9)
    order = np.arange(7)
    samples = np.arange((35 - 1) // 5)
    state = np.random.RandomState(9)
    state.shuffle(order)
    state.shuffle(samples)
    stream = [token for d in order for token in documents[d]]
    assert [data[k].tolist() for k in range(6)] == [stream[5 * j : 5 * j + 6] for j in samples]


@pytest.mark.parametrize("workers", [0, 1])
def test_r047_r053_resume_across_epochs(tmp_path, workers):
    prefix = shard(tmp_path / "a", [[d] * 4 for d in range(19)])  # (76-1)//4 = 18 samples, 6 steps of 3 per epoch

    def source(num_workers):
        data = TokenDataset([prefix], seq_len=4, seed=1)
        return BatchSource(data, local_batch_size=3, global_batch_size=3, dp_rank=0, dp_size=1, num_workers=num_workers)

    straight = source(0)
    expected = [straight.next_step()[0].tokens.tolist() for _ in range(24)]
    assert expected[:6] != expected[6:12] != expected[12:18]
    for step in (6, 12, 16):
        part = source(workers)
        part.load_state_dict({"consumed_samples": 3 * step})
        assert [part.next_step()[0].tokens.tolist() for _ in range(6)] == expected[step : step + 6]
        part.close()


def test_r036_a_tiny_set_repeats_or_is_refused(tmp_path):
    prefix = shard(tmp_path / "a", [list(range(20))])
    data = TokenDataset([prefix], seq_len=16, seed=0)
    assert len(data) == 1
    assert [data[k].tolist() for k in range(4)] == [list(range(17))] * 4
    with pytest.raises(ConfigError, match="20 tokens, fewer than the 65"):
        TokenDataset([prefix], seq_len=64, seed=0)
    repeated = TokenDataset([prefix], seq_len=64, seed=0, repeat=True)  # 4 passes fill one sample
    assert len(repeated) == 1 and repeated[2].tolist() == [*range(20)] * 3 + [*range(5)]
    with pytest.raises(ConfigError, match="0 tokens"):
        TokenDataset([shard(tmp_path / "none", [])], seq_len=64, seed=0)


def test_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(*prefixes):
        return TokenDataset(list(prefixes), seq_len=1, seed=0).fingerprint

    (tmp_path / "sub").mkdir()
    a, same = shard(tmp_path / "a", [[1, 2]], documents=1), shard(tmp_path / "sub" / "c", [[1, 2]], documents=1)
    other = shard(tmp_path / "b", [[1, 3]], documents=1)
    assert fingerprint(a) == fingerprint(same) != fingerprint(other)
    assert fingerprint(a, other) != fingerprint(other, a)
    d, e, f = (shard(tmp_path / name, ids) for name, ids in {"d": [[1, 2]], "e": [[1], [2]], "f": [[1, 2, 3]]}.items())
    assert len({fingerprint(d), fingerprint(e), fingerprint(f)}) == 3


def test_folders_and_patterns_stand_for_their_shards(tmp_path):
    folder = tmp_path / "set[1]"  # a name that a pattern would read otherwise
    folder.mkdir()
    for n in (2, 0, 1):
        shard(folder / f"train_0000{n}", [[n] * 5])
    shard(folder / "validation", [[9] * 5])
    entry = f"{folder}/train_*"
    assert expand(entry) == [f"{folder}/train_0000{n}" for n in range(3)]
    assert expand(folder) == [*expand(entry), f"{folder}/validation"]
    data = TokenDataset([entry], seq_len=14, seed=0, shuffle=False)
    assert data.prefixes == expand(entry) and data[0].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert data.epochs(3) == {entry: 3.0}
    (tmp_path / "none").mkdir()
    for missing, sentence in (
        (tmp_path / "none", r"folder .*none has no \.idx"),
        (f"{folder}/test*", r"nothing matches .*test\*"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            TokenDataset([missing], seq_len=4, seed=0)
    assert len(check_data([f"{folder}/test*", str(tmp_path / "absent")], 4, 300, None)) == 2
    shard(tmp_path / "none", [[1, 2]])  # a shard beside a folder of its name: the shard is meant
    assert expand(tmp_path / "none") == [str(tmp_path / "none")]


def test_a_series_is_read_whole_or_not_at_all(tmp_path):
    for n in (2, 0, 1):
        shard(tmp_path / f"train_0000{n}", [[n] * 5])
    data = TokenDataset([tmp_path / "train"], seq_len=14, seed=0, shuffle=False)
    assert data[0].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    (tmp_path / "train_00001.idx").unlink()
    with pytest.raises(ConfigError, match=r"train_00001\.idx is missing, one of"):
        TokenDataset([tmp_path / "train"], seq_len=4, seed=0)


def test_r041_no_token_is_lost_but_an_epochs_last(tmp_path):
    documents = [[1] * 4, [2] * 2, [3] * 3, [4], list(range(100, 150))]  # 60 tokens: 19 samples of S=3, 2 left over
    data = TokenDataset([shard(tmp_path / "a", documents)], seq_len=3, seed=5)
    inputs = sorted(token for k in range(len(data)) for token in data[k][:-1].tolist())
    everything = sorted(token for document in documents for token in document)
    lost = list(everything)
    for token in inputs:
        lost.remove(token)  # fails for a token that is read twice
    assert len(lost) == 3  # the last label, which is no input, and what is reported as left over
    assert data.summary == "5 documents, 60 tokens, 19 samples per epoch (2 tokens left over)"


@pytest.mark.parametrize("workers", [0, 2])
def test_r064_all_fields_of_unaligned_documents_survive_a_resume(tmp_path, workers):
    prefix = shard(tmp_path / "a", [[10 * d + t for t in range(5)] for d in range(40)])

    def source(consumed, num_workers):
        made = BatchSource(
            TokenDataset([prefix], seq_len=16, seed=1, documents=True),
            local_batch_size=1, global_batch_size=2, dp_rank=0, dp_size=1, num_workers=num_workers,
            reset_attention_mask=True, reset_position_ids=True,
        )  # fmt: skip
        made.load_state_dict({"consumed_samples": consumed})
        return made

    def fields(step):
        return [[t.tolist() for t in (b.tokens, b.labels, b.positions, b.starts)] + [b.lengths] for b in step]

    straight = source(0, 0)
    expected = [fields(straight.next_step()) for _ in range(8)]
    for stop in range(1, 7) if not workers else (3,):
        part = source(2 * stop, workers)
        assert [fields(part.next_step()) for _ in range(2)] == expected[stop : stop + 2]
        part.close()


def test_data_without_fault_have_no_problems(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"any")
    sha = file_sha256(tmp_path / "tokenizer.model")
    prefix = shard(tmp_path / "a", [list(range(20))], tokenizer_sha256=sha)
    assert check_data([prefix], 19, 300, tmp_path / "tokenizer.model") == []
    assert check_data([prefix], 19, 320, None) == []


def test_check_names_every_problem_of_the_files(tmp_path):
    cut = shard(tmp_path / "cut", [[1, 2, 3]], documents=1)
    (tmp_path / "cut.bin").write_bytes(b"\x01\x00\x02")
    problems = check_data([str(tmp_path / "absent"), cut], 2, 300, None)
    assert len(problems) == 2
    assert "absent.idx" in problems[0]
    assert "cut.bin has 3 bytes" in problems[1] and "implies 6" in problems[1]
    assert "at least one prefix" in check_data([], 2, 300, None)[0]


def test_check_names_tokenizer_vocabulary_and_length(tmp_path):
    """R038, and shards of another tokenizer."""
    prefix = shard(tmp_path / "a", [[1, 2, 3]], documents=1)
    (tmp_path / "other.model").write_bytes(b"any")
    length, tokenizer, vocabulary = check_data([prefix], 8, 256, tmp_path / "other.model")
    assert "3 tokens" in length and "9 of one sample" in length
    assert "another tokenizer" in tokenizer and "other.model" in tokenizer
    assert "300 ids" in vocabulary and "256" in vocabulary
    (short,) = check_data([prefix], 8, 300, None, validation=[prefix], repeat=True)  # validation reads once
    assert "3 tokens" in short and check_data([prefix], 8, 300, None, repeat=True) == []
    (missing,) = check_data([prefix], 2, 300, tmp_path / "absent.model")
    assert "absent.model" in missing


def test_prefixes_of_different_tokenizers(tmp_path):
    a = shard(tmp_path / "a", [[1, 2, 3]], tokenizer_sha256="aa")
    b = shard(tmp_path / "b", [[1, 2, 3]], tokenizer_sha256="bb")
    with pytest.raises(ConfigError, match="different tokenizers"):
        TokenDataset([a, b], seq_len=2, seed=0)
    assert len(check_data([a, b], 2, 300, None)) == 1


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("workers", "wrong"), [(0, 300), (0, -1), (1, 2**31 - 1)])
def test_an_id_outside_the_vocabulary_is_named_with_its_document(tmp_path, workers, wrong, documents, blend):
    a = shard(tmp_path / "a", [[299, 0, 1]])
    b = shard(tmp_path / "b", [[2, 3, 4], [5] * 4, [6, wrong, 7], [8]], np.int32)
    data = open_training_data(
        [a, b], [0.5, 0.5] if blend else None, seq_len=2, seed=3, documents=documents, repeat=False
    )
    source = BatchSource(
        data, local_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1, num_workers=workers, vocab_size=300
    )
    with pytest.raises(ConfigError) as caught:
        for _ in range(10):
            source.next_step()
    source.close()
    expected = f"document 2 of {b} has the token id {wrong}, but the model's vocabulary has the ids 0 to 299; "
    assert caught.value.problems == [f"{expected}prepare the data again or raise the model's vocabulary"]
    validation = TokenDataset([a, b], seq_len=2, seed=0, shuffle=False, documents=documents)
    with pytest.raises(ConfigError, match=f"document 2 of .*b has the token id {wrong},"):
        list(evaluation_batches(validation, 100, 2, 0, 1, vocab_size=300))


def test_documents_of_several_sequences_are_counted_as_documents(tmp_path):
    prefix = shard(tmp_path / "a", [[1, 2], [3, 4], [5, 6], [7, 8]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[26:34] = struct.pack("<Q", 3)  # two documents of two sequences: the boundaries 0, 2, 4
    (tmp_path / "a.idx").write_bytes(bytes(index[: 34 + 12 * 4]) + struct.pack("<3q", 0, 2, 4))
    data = TokenDataset([prefix], seq_len=7, seed=0, shuffle=False)
    assert [data.place(0, at)[:10] for at in range(8)] == ["document 0"] * 4 + ["document 1"] * 4


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("dtype", "int32", "a.idx has dtype uint16, its manifest says int32;"),
        ("tokens", 7, "a.idx has tokens 4, its manifest says 7;"),
        ("documents", 1, "a.idx has documents 2, its manifest says 1;"),
    ],
)
def test_a_manifest_that_differs_from_the_index_is_refused(tmp_path, field, value, sentence):
    prefix = shard(tmp_path / "a", [[1, 2, 3], [4]], source="test")
    Manifest.load(prefix).model_copy(update={field: value}).save(prefix)
    (problem,) = check_data([prefix], 2, 300, None)
    assert sentence in problem and "prepare the data again" in problem
    with pytest.raises(ConfigError, match=sentence):
        TokenDataset([prefix], seq_len=2, seed=0)


def test_files_that_are_not_those_of_the_manifest(tmp_path):
    prefix = shard(tmp_path / "a", [[1, 2, 3]], documents=1)
    shard(tmp_path / "a", [[1, 2, 3, 4]])  # rebuilt by another tool, the old manifest stays
    assert "a.bin has 8 bytes, its manifest says 6" in check_data([prefix], 2, 300, None)[0]
    (tmp_path / "a.manifest.json").write_text('{"format_version": 2}')
    (problem,) = check_data([prefix], 2, 300, None)
    assert "bad manifest" in problem and "a.manifest.json: format_version: Input should be 1" in problem
