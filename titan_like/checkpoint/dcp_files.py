"""The tensor files of a checkpoint: torch's distributed checkpoint (DCP), in any folder of storage.py.

Locally DCP writes by itself. To a URL, it writes through RemoteFiles, which hashes what passes: reading it back would
cost as much as writing it, and would take what the store has made of it for what was meant.

The only place that gives DCP's reader and writer another `fs`, as torch's own subclasses for fsspec do (in a private
module; they keep no hashes). Checked on torch 2.13.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from upath import UPath

from titan_like.checkpoint.storage import Entry, Folder, is_there, store_of

Group = dist.ProcessGroup | None  # None: the default group
THREADS = 4  # of one rank's files to a store: one stream does not fill the line
READING: dict[str, Any] = {"block_size": 2**23, "cache_type": "blockcache"}  # torch.load jumps to a tensor's end


def dcp_save(
    tensors: dict[str, Tensor],
    path: Folder,
    group: Group,
    *,
    planner: dcp.SavePlanner | None = None,
    single_file_per_rank: bool = True,
) -> dict[str, Entry]:
    """Save to the folder `path`; collective. The files that this rank has written.

    Args:
        single_file_per_rank: else one per tensor, which DCP then reads one by one from a planner.
    """
    if isinstance(path, Path):
        local = dcp.FileSystemWriter(path, single_file_per_rank=single_file_per_rank)
        dcp.save(tensors, storage_writer=local, planner=planner, process_group=group)
        return written_here(path, dist.get_rank(group))
    threads = THREADS if single_file_per_rank else 1
    writer = dcp.FileSystemWriter(
        str(path), single_file_per_rank=single_file_per_rank, sync_files=False, thread_count=threads
    )
    files = RemoteFiles(path)
    writer.fs, writer.path = cast(Any, files), str(path)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
    if files.errors:  # of a thread, whose file DCP then forgets
        raise files.errors[0]
    return files.written


def written_here(path: Path, rank: int) -> dict[str, Entry]:
    """What DCP has written to a local folder in the name of `rank`."""
    metadata = [path / ".metadata"] if rank == 0 else []
    return {file.name: store_of(path).measure(file) for file in [*path.glob(f"__{rank}_*.distcp"), *metadata]}


def reader(path: Folder) -> dcp.FileSystemReader:
    """Reads the checkpoint folder `path`; of a URL, only what is asked for."""
    if isinstance(path, Path):
        return dcp.FileSystemReader(path)
    remote = dcp.FileSystemReader(str(path))
    remote.fs, remote.path = cast(Any, RemoteFiles(path)), str(path)
    return remote


class RemoteFiles(FileSystemBase):
    """The files of one folder, by any path that ends with their name.

    Attributes:
        written: size and hash of each file that was written through this.
        errors: what writing has raised.
    """

    def __init__(self, folder: UPath) -> None:
        self.folder = folder
        self.written: dict[str, Entry] = {}
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self.folder.fs.open(self._at(path).path, mode, **READING) as stream:
                yield stream
            return
        try:
            with self.folder.fs.open(self._at(path).path, mode) as stream:
                hashing = _HashingStream(stream)
                yield hashing
        except Exception as error:
            self.errors.append(error)
            raise
        self.written[self._at(path).name] = {"size": hashing.size, "sha256": hashing.digest.hexdigest()}

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        old, new = self._at(path), self._at(new_path)
        old.fs.mv(old.path, new.path)
        self.written[new.name] = self.written.pop(old.name)

    def init_path(self, path: str | os.PathLike) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        """A store has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return "://" in str(checkpoint_id)

    def exists(self, path: str | os.PathLike) -> bool:
        return is_there(self._at(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        self._at(path).unlink()

    def _at(self, path: str | os.PathLike) -> UPath:
        return self.folder / str(path).rsplit("/", 1)[-1]


class _HashingStream:
    """Writes on to a stream and hashes; has what DCP asks of a file that it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.digest, self.size = stream, hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        self._stream.write(content)
        view = memoryview(content).cast("B")
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """At the end."""

    def close(self) -> None:
        """Of a tensor; the file goes on."""
