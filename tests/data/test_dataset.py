import os

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.dataset import TokenDataset, check_data
from titan_like.data.indexed import IndexedWriter
from titan_like.data.loader import BatchSource
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
    assert fingerprint(shard(tmp_path / "d", [[1, 2]])) != fingerprint(shard(tmp_path / "e", [[1, 2, 3]]))


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
    prefix = shard(tmp_path / "a", [[1, 2, 3]], documents=1)
    (tmp_path / "other.model").write_bytes(b"any")
    length, tokenizer, vocabulary = check_data([prefix], 8, 256, tmp_path / "other.model")
    assert "3 tokens" in length and "9 of one sample" in length
    assert "another tokenizer" in tokenizer and "other.model" in tokenizer
    assert "300 ids" in vocabulary and "256" in vocabulary
    (missing,) = check_data([prefix], 2, 300, tmp_path / "absent.model")
    assert "absent.model" in missing


def test_prefixes_of_different_tokenizers(tmp_path):
    a = shard(tmp_path / "a", [[1, 2, 3]], tokenizer_sha256="aa")
    b = shard(tmp_path / "b", [[1, 2, 3]], tokenizer_sha256="bb")
    with pytest.raises(ConfigError, match="different tokenizers"):
        TokenDataset([a, b], seq_len=2, seed=0)
    assert len(check_data([a, b], 2, 300, None)) == 1


def test_files_that_are_not_those_of_the_manifest(tmp_path):
    prefix = shard(tmp_path / "a", [[1, 2, 3]], documents=1)
    shard(tmp_path / "a", [[1, 2, 3, 4]])  # rebuilt by another tool, the old manifest stays
    assert "a.bin has 8 bytes, its manifest says 6" in check_data([prefix], 2, 300, None)[0]
    (tmp_path / "a.manifest.json").write_text('{"format_version": 2}')
    (problem,) = check_data([prefix], 2, 300, None)
    assert "bad manifest" in problem and "a.manifest.json: format_version: Input should be 1" in problem
