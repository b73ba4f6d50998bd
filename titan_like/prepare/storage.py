"""Finding and opening input files: local paths, or those of REMOTE through blobfile (imported when one is named)."""

import bz2
import gzip
import importlib
import io
import lzma
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from titan_like.config.errors import ConfigError
from titan_like.prepare.config import STDLIB, source_problem

JSONL, PARQUET, TEXT = "jsonl", "parquet", "text"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_FORMATS = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET}
# Tests, installed packages and vendored or generated data are not the standard library's own source.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "__pycache__"}
)


def find_files(sources: Sequence[str], text_suffixes: Sequence[str]) -> list[str]:
    """The files of all sources in a fixed order, none twice.

    Raises:
        ConfigError: a source cannot be read, does not exist or holds no file of a known kind.
    """
    if problems := list(filter(None, (source_problem("the input", source) for source in sources))):
        raise ConfigError(*problems)
    files: dict[str, None] = {}
    for source in sources:
        root = sysconfig.get_path("stdlib") if source == STDLIB else source
        left_out = LEFT_OUT if source == STDLIB else frozenset()
        known = (*_FORMATS, *text_suffixes)
        try:
            found = [root] if _is_file(root) else sorted(p for p in _walk(root, left_out) if _ending(p) in known)
        except Exception as error:  # blobfile's errors have no common base with Python's
            if not type(error).__module__.startswith("blobfile"):
                raise
            raise ConfigError(f"source {source} cannot be read: {error}; check its name and your access") from error
        if not found:
            raise ConfigError(
                f"source {source}: no such file, or no {', '.join(known)} file in {root}; "
                f"give files, folders or '{STDLIB}'"
            )
        files.update(dict.fromkeys(found))
    return list(files)


def format_of(path: str) -> str:
    return _FORMATS.get(_ending(path), TEXT)


def is_compressed(path: str) -> bool:
    return path.endswith(COMPRESSED)


def size_of(path: str) -> int:
    """Bytes as stored."""
    return _blobfile().stat(path).size if _is_remote(path) else os.path.getsize(path)


def open_bytes(path: str) -> IO[bytes]:
    """The file for reading, decompressed; seekable if it is not compressed.

    Raises:
        ConfigError: a package for it is missing.
        OSError: it cannot be opened.
    """
    file = _open_stored(path)
    suffix = PurePosixPath(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if suffix == ".bz2":
        return bz2.BZ2File(file)
    if suffix == ".xz":
        return lzma.LZMAFile(file)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdFile(file, need("zstandard", path).ZstdDecompressor()), 1 << 17)
    return file


def _open_stored(path: str) -> IO[bytes]:
    if _is_remote(path):
        return cast(IO[bytes], _blobfile().BlobFile(path, "rb", streaming=True))
    return open(path, "rb")


class _ZstdFile(io.RawIOBase):
    """zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, file: IO[bytes], decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            if not (block := self._file.read(1 << 17)):
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            self._left = self._decompress(block)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def _decompress(self, block: bytes) -> bytes:
        parts = []
        while block:
            self._frame = self._frame or self._decompressor.decompressobj()
            parts.append(self._frame.decompress(block))
            block = b""
            if self._frame.eof:
                block, self._frame = self._frame.unused_data, None
        return b"".join(parts)


def need(package: str, what: str) -> Any:
    """Import an optional package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        raise ConfigError(f"{what} needs the package {root}, which is not installed; pip install {root}") from error


def _ending(path: str) -> str:
    suffixes = PurePosixPath(path).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_remote(path: str) -> bool:
    return "://" in path


def _blobfile() -> Any:
    return need("blobfile", "a path with ://")


def _is_file(path: str) -> bool:
    return not _blobfile().isdir(path) and _blobfile().exists(path) if _is_remote(path) else Path(path).is_file()


def _walk(root: str, left_out: frozenset[str]) -> Iterator[str]:
    walk = _blobfile().walk if _is_remote(root) else os.walk
    for folder, folders, names in walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (f"{folder.rstrip('/')}/{name}" for name in names if not name.startswith("."))
