"""Megatron's .idx/.bin token files: a memory-mapped reader and an atomic writer.

Source of the format: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py. `{prefix}.bin` holds the tokens of
all sequences one after the other; `{prefix}.idx` holds a 34-byte header (magic, version, dtype code, counts), then
int32 lengths, int64 byte offsets and the int64 document boundaries, all little-endian.
"""

import os
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats: no tokens
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron chooses: uint16 below 65,500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """Token sequences of one .idx/.bin pair, opened read-only.

    Attributes:
        dtype: of the tokens, as the header says.
        lengths: (sequences,) int32, tokens per sequence.
        pointers: (sequences,) int64, byte offset of each sequence in the .bin file.
        document_indices: (documents + 1,) int64; document d is the sequences [indices[d], indices[d+1]).
    Raises:
        ConfigError: a file is missing, of another kind, or shorter or longer than the index implies.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._read_index(Path(f"{prefix}.idx"))
        self._map_tokens(Path(f"{prefix}.bin"))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def read(self, i: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of sequence i (stop None: to its end), a read-only view of the file."""
        length = int(self.lengths[i])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens [{start}, {stop}) of sequence {i} of {self.prefix}, which has {length} tokens")
        first = int(self.pointers[i]) // self.dtype.itemsize
        return self._tokens[first + start : first + stop]

    def blocks(self, tokens: int = 1 << 20) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the first token, tokens) of consecutive parts of the whole file."""
        return ((first, self._tokens[first : first + tokens]) for first in range(0, self.num_tokens, tokens))

    def document_of(self, token: int) -> int:
        """The document that the token with this index in the file belongs to."""
        sequence = np.searchsorted(np.cumsum(self.lengths, dtype=np.int64), token, side="right")
        return self.document_of_sequence(int(sequence))

    def document_of_sequence(self, i: int) -> int:
        return int(np.searchsorted(self.document_indices, i, side="right")) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)  # a worker process maps the files anew instead of receiving their content

    def _read_index(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; check the data prefix {self.prefix}") from error
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise ConfigError(f"{path} is no Megatron .idx file (it does not begin with MMIDIDX and a full header)")
        _, version, code, sequences, boundaries = HEADER.unpack_from(data)
        if version != VERSION:
            raise ConfigError(f"{path} has format version {version}, only {VERSION} is known; prepare the data again")
        if code not in DTYPES:
            raise ConfigError(f"{path} has the dtype code {code}, token files have one of {sorted(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if len(data) not in (expected, expected + sequences):  # multimodal files end in one mode byte per sequence
            raise ConfigError(
                f"{path} has {len(data)} bytes, its header implies {expected}: it is damaged or truncated; "
                "copy or prepare the data again"
            )
        self.dtype = np.dtype(DTYPES[code])
        offset = HEADER.size
        self.lengths = np.frombuffer(data, "<i4", sequences, offset)
        self.pointers = np.frombuffer(data, "<i8", sequences, offset + 4 * sequences)
        self.document_indices = np.frombuffer(data, "<i8", boundaries, offset + 12 * sequences)
        if not np.array_equal(self.pointers, _byte_offsets(self.lengths, self.dtype)) or (self.lengths < 0).any():
            raise ConfigError(f"{path} is damaged: its lengths and offsets disagree; copy or prepare the data again")
        bounds = self.document_indices
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
            wrong = bounds[(bounds < 0) | (bounds > sequences)]
            example = f" (one is {wrong[0]})" if len(wrong) else ""
            raise ConfigError(
                f"{path} is damaged: its document boundaries do not rise from 0 to its {sequences} sequences{example}; "
                "copy or prepare the data again"
            )

    def _map_tokens(self, path: Path) -> None:
        expected = self.num_tokens * self.dtype.itemsize
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; check the data prefix {self.prefix}") from error
        if actual != expected:
            raise ConfigError(
                f"{path} has {actual} bytes but {self.prefix}.idx implies {expected}: "
                "one of them is damaged or truncated; copy or prepare the data again"
            )
        # as a plain array: slices of a memmap object cost three times as much
        self._tokens = np.asarray(np.memmap(path, self.dtype, mode="r")) if expected else np.empty(0, self.dtype)


class IndexedWriter:
    """Writes one .idx/.bin pair, each document as one sequence; use it as a context manager.

    The files appear under their names, .bin first, when the block ends without an error; otherwise nothing is left.
    Memory: 4 bytes per document.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type[np.integer]) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise ValueError(f"dtype {self.dtype}: Megatron's format knows {', '.join(str(d) for d in CODES)}")
        self._lengths = array("i")
        self._bin, self._idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document of at least one token.

        Raises:
            ConfigError: an id does not fit the dtype (nothing is ever wrapped around).
        """
        self.add_parts([ids])

    def add_parts(self, parts: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Append one document that comes in parts; errors as for `add_document`."""
        arrays = [np.asarray(part) for part in parts if len(part)]
        if not arrays or any(array.ndim != 1 for array in arrays):
            raise ValueError(
                f"document {len(self._lengths)} of {self.prefix}: expected a flat list of at least one token"
            )
        for tokens in arrays:
            self._check(tokens)
        for tokens in arrays:
            self._file.write(tokens.astype(self.dtype, casting="unsafe").tobytes())
        self._lengths.append(sum(map(len, arrays)))

    def _check(self, tokens: np.ndarray) -> None:
        limits = np.iinfo(self.dtype)
        for token in (int(tokens.min()), int(tokens.max())):
            if not limits.min <= token <= limits.max:
                raise ConfigError(
                    f"document {len(self._lengths)} of {self.prefix} has the token id {token}, which {self.dtype} "
                    f"({limits.min} to {limits.max}) cannot hold; choose a wider dtype"
                )

    def __enter__(self) -> "IndexedWriter":
        self._file = open(_temporary(self._bin), "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._file.close()
            for path in (self._bin, self._idx):
                _temporary(path).unlink(missing_ok=True)

    def _commit(self) -> None:
        _sync(self._file)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        _write_index(_temporary(self._idx), self.dtype, lengths, np.arange(len(lengths) + 1, dtype=np.int64))
        os.replace(_temporary(self._bin), self._bin)
        os.replace(_temporary(self._idx), self._idx)


def merge_indexed(datasets: Sequence[IndexedDataset], prefix: str | Path) -> None:
    """Write the documents of all datasets in their order as one .idx/.bin pair.

    Raises:
        ConfigError: their dtypes differ.
    """
    dtypes = {dataset.dtype for dataset in datasets}
    if len(dtypes) != 1:
        found = ", ".join(f"{dataset.prefix}: {dataset.dtype}" for dataset in datasets)
        raise ConfigError(f"shards of different dtypes cannot be merged ({found}); prepare them with one output.dtype")
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    documents = [np.zeros(1, np.int64)]
    first = 0
    for dataset in datasets:
        documents.append(dataset.document_indices[1:] + first)
        first += dataset.num_sequences
    try:
        with open(_temporary(bin_path), "wb") as out:
            for dataset in datasets:
                with open(f"{dataset.prefix}.bin", "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
            _sync(out)
        lengths = np.concatenate([dataset.lengths for dataset in datasets])
        _write_index(_temporary(idx_path), dtypes.pop(), lengths, np.concatenate(documents))
        os.replace(_temporary(bin_path), bin_path)
        os.replace(_temporary(idx_path), idx_path)
    finally:
        for path in (bin_path, idx_path):
            _temporary(path).unlink(missing_ok=True)


def _write_index(path: Path, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray) -> None:
    with open(path, "wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
        index.write(lengths.astype("<i4").tobytes())
        index.write(_byte_offsets(lengths, dtype).astype("<i8").tobytes())
        index.write(documents.astype("<i8").tobytes())
        _sync(index)


def _byte_offsets(lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
