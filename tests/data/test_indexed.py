import pickle
import struct
import tracemalloc
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.indexed import IndexedDataset, IndexedWriter, optimal_dtype

# Two documents, [1, 2, 3] and [65535], as uint16 (code 8), worked out from the format's table.
BIN = b"\x01\x00\x02\x00\x03\x00\xff\xff"
IDX = (
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
    b"\x08"  # dtype code
    b"\x02\x00\x00\x00\x00\x00\x00\x00"  # sequences
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # documents + 1
    b"\x03\x00\x00\x00\x01\x00\x00\x00"  # lengths
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00"  # byte offsets
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
)


def write(prefix: Path, documents: list[list[int]], dtype=np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def put(prefix: Path, idx: bytes, bin: bytes) -> Path:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bin)
    return prefix


def test_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "a.b", [[1, 2, 3], [65535]])  # a dot in the name is no suffix
    assert (tmp_path / "a.b.bin").read_bytes() == BIN
    assert (tmp_path / "a.b.idx").read_bytes() == IDX
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


@pytest.mark.parametrize(
    "dtype, bin, idx",
    [
        (
            np.uint16,
            "5637105a649671707321c2a952f76aed37dfe02e20cadef113a199394116d6e0",
            "ff632f28a012689aed842372d80d456e20439a0ab946d8c0283f92f52bab4329",
        ),
        (
            np.int32,
            "86fd863f8c52b44851735636e36b8980375bc314261254780290b110abfaab8d",
            "540d62b7c2d50659cb40bcc71067ef22334bfc14acc9118901c2d1d14cad176d",
        ),
    ],
)
def test_files_are_those_of_megatron(tmp_path, dtype, bin, idx):
    """sha256 of what IndexedDatasetBuilder of megatron-core 0.16.1 wrote for the same tokens."""
    write(tmp_path / "a", [(np.arange(i * 7 % 50 + 1) * 131 + i) % 30_000 for i in range(1, 101)], dtype)
    assert [sha256((tmp_path / f"a.{end}").read_bytes()).hexdigest() for end in ("bin", "idx")] == [bin, idx]


@pytest.mark.parametrize(
    "boundaries", [(0, 1, 10**9), (0, 10**9, 2), (0, 1, 1), (1, 1, 2), (0, -1, 2), (0, 2, 1, 2), ()]
)
def test_document_boundaries_that_do_not_fit_are_refused(tmp_path, boundaries):
    head = bytearray(IDX[: 34 + 12 * 2])
    head[26:34] = struct.pack("<Q", len(boundaries))
    put(tmp_path / "x", bytes(head) + struct.pack(f"<{len(boundaries)}q", *boundaries), BIN)
    with pytest.raises(ConfigError, match=r"x\.idx is damaged: its document boundaries .* from 0 to its 2 sequences"):
        IndexedDataset(tmp_path / "x")


def test_reads_hand_made_files(tmp_path):
    data = IndexedDataset(put(tmp_path / "x", IDX, BIN))
    assert data.dtype == np.uint16
    assert (data.num_sequences, data.num_tokens) == (2, 4)
    assert data.lengths.tolist() == [3, 1]
    assert data.pointers.tolist() == [0, 6]
    assert data.document_indices.tolist() == [0, 1, 2]
    assert data.read(0).tolist() == [1, 2, 3]
    assert data.read(0, 1, 2).tolist() == [2]
    assert data.read(1).tolist() == [65535]
    with pytest.raises(IndexError):
        data.read(1, 0, 2)
    with pytest.raises(ValueError, match="read-only"):
        data.read(0)[0] = 7
    assert len(pickle.dumps(data)) < 500  # a worker gets the path, not the tokens
    assert pickle.loads(pickle.dumps(data)).read(0).tolist() == [1, 2, 3]


def test_multimodal_mode_bytes_are_tolerated(tmp_path):
    assert IndexedDataset(put(tmp_path / "x", IDX + b"\x00\x00", BIN)).num_tokens == 4


@pytest.mark.parametrize("eod", [[], [9]])
def test_r018_lengths_agree_with_the_bytes(tmp_path, eod):
    documents = [[1] * 5 + eod, [2, *eod], [3] * 8 + eod]
    data = IndexedDataset(write(tmp_path / "x", documents, np.int32))
    assert [data.read(i).tolist() for i in range(3)] == documents
    assert (tmp_path / "x.bin").stat().st_size == 4 * (14 + 3 * len(eod))


def test_r019_dtype_follows_the_vocabulary(tmp_path):
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32
    ids = [65535, 65536, 70000]
    assert IndexedDataset(write(tmp_path / "wide", [ids], optimal_dtype(70001))).read(0).tolist() == ids


@pytest.mark.parametrize(("dtype", "ids"), [(np.uint16, [3, 65536]), (np.uint16, [-1]), (np.int32, [2**31])])
def test_r019_no_id_is_wrapped(tmp_path, dtype, ids):
    wrong = max(ids, key=abs)
    with pytest.raises(ConfigError, match=rf"document 1 .*token id {wrong}\b.*{np.dtype(dtype)}"):
        write(tmp_path / "x", [[1], ids], dtype)
    assert list(tmp_path.iterdir()) == []


def test_empty_documents_and_float_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"document 0 .*at least one token"):
        write(tmp_path / "x", [[]])
    with pytest.raises(ValueError, match="float32"):
        IndexedWriter(tmp_path / "x", np.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_old_files(tmp_path):
    write(tmp_path / "x", [[1, 2, 3], [65535]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([7])
        raise RuntimeError
    assert (tmp_path / "x.bin").read_bytes() == BIN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_no_documents(tmp_path):
    data = IndexedDataset(write(tmp_path / "x", []))
    assert (data.num_sequences, data.num_tokens, data.document_indices.tolist()) == (0, 0, [0])


def test_r022_truncated_bin(tmp_path):
    prefix = put(tmp_path / "x", IDX, BIN[:-3])
    with pytest.raises(ConfigError) as caught:
        IndexedDataset(prefix)
    (sentence,) = caught.value.problems
    assert f"{prefix}.bin has 5 bytes" in sentence and f"{prefix}.idx implies 8" in sentence
    assert (tmp_path / "x.bin").read_bytes() == BIN[:-3]


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "no Megatron .idx"),
        (IDX[:20], "no Megatron .idx"),
        (b"X" + IDX[1:], "no Megatron .idx"),
        (IDX[:9] + struct.pack("<Q", 2) + IDX[17:], "version 2"),
        (IDX[:17] + b"\x09" + IDX[18:], "dtype code 9"),
        (IDX[:17] + b"\x07" + IDX[18:], "dtype code 7"),
        (IDX[:-1], f"has {len(IDX) - 1} bytes, its header implies {len(IDX)}"),
        (IDX + b"\x00", "damaged or truncated"),
        (IDX[:18] + struct.pack("<Q", 2**60) + IDX[26:], "damaged or truncated"),
        (IDX[:34] + struct.pack("<i", 4) + IDX[38:], "lengths and offsets disagree"),
        (IDX[:34] + struct.pack("<iiqq", 5, -1, 0, 10) + IDX[58:], "lengths and offsets disagree"),
    ],
)
def test_damaged_index(tmp_path, idx, message):
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(put(tmp_path / "x", idx, BIN))


def test_missing_files(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.idx: No such file"):
        IndexedDataset(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(IDX)
    with pytest.raises(ConfigError, match=r"x\.bin: No such file"):
        IndexedDataset(tmp_path / "x")


def test_r043_memory_per_document(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        token = np.array([5], np.uint16)
        for _ in range(1000):
            writer.add_document(token)
        tracemalloc.start()
        for _ in range(50_000):
            writer.add_document(token)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < 50_000 * 8  # a Python list of ints would need 8 bytes for the pointers alone
    assert IndexedDataset(tmp_path / "x").num_tokens == 51_000
