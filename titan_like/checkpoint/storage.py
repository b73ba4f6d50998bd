"""Where checkpoints lie: a local folder, or the URL of an object store that fsspec knows (s3://, gs://, az://, memory://).

The only place that knows how either makes a checkpoint exist at once and cease at once:

- a local one is written under another name, flushed to the disk and renamed
- an object store has no rename; there the manifest is one object, which is written last and deleted first

A folder is a Path or a UPath, which have the same methods. Drivers raise what they like: what can go wrong with a URL
is any Exception. Imports no torch.
"""

import hashlib
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from upath import UPath

from titan_like.config.errors import ConfigError

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(0|[1-9]\d*)")

Folder: TypeAlias = Path | UPath
Entry = dict[str, Any]  # {"size": bytes, "sha256": hex digits} of one file
F = TypeVar("F", Path, UPath)


def is_url(name: str) -> bool:
    return "://" in name


def locate(name: str | Path, inside: Path | None = None) -> Folder:
    """The folder that a setting or an argument names: a URL, an absolute path, or a path in the folder `inside`.

    Raises:
        ConfigError: the driver of the URL is not installed, or nobody knows its protocol.
    """
    if isinstance(name, Path) or not is_url(name):
        return (inside or Path()) / name
    # Another rank's files must be seen, so no listing is kept. Only file:// has folders that need to be made.
    options: dict[str, Any] = {"use_listings_cache": False}
    if name.startswith(("file:", "local:")):
        options["auto_mkdir"] = True
    try:
        url = UPath(name.rstrip("/"), **options)
        _ = url.fs  # imports the driver
    except ImportError as error:
        raise ConfigError(
            f'"{name}" needs a driver that is missing ({error}); install that package with pip, or use a local folder'
        ) from error
    except ValueError as error:
        raise ConfigError(
            f'"{name}" cannot be used ({error}); use a URL that fsspec knows, or a local folder'
        ) from error
    return url


def check_url(key: str, url: str) -> list[str]:
    """Whether the driver of `url`, the value of `key`, is installed and something can be written there: a small object,
    which is deleted again."""
    try:
        probe = locate(url) / f".write-test-{uuid.uuid4().hex}"
        store_of(probe).write(probe, b"?")
        probe.unlink()
    except ConfigError as error:
        return [f"{key}: {problem}" for problem in error.problems]
    except Exception as error:
        reason = f"{error}".partition("\n")[0] or type(error).__name__
        return [f'{key} is "{url}", but nothing can be written there ({reason}); choose another folder']
    return []


def is_there(path: Folder) -> bool:
    """Whether there is such a file. What cannot be told raises: `exists` and `is_file` of a UPath then say no, and a
    checkpoint whose manifest is said not to be there is deleted."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class Store(ABC, Generic[F]):
    """How the checkpoints of one kind of folder come and go. What writes and deletes is for one rank."""

    @abstractmethod
    def draft(self, final: F) -> F:
        """The folder that the files of the checkpoint `final` are written to."""

    @abstractmethod
    def exists(self, final: F) -> bool:
        """Whether the name of the checkpoint `final` is taken."""

    @abstractmethod
    def begin(self, draft: F) -> None:
        """Make an empty draft, whatever a save that was cut short has left there."""

    @abstractmethod
    def write(self, path: F, content: bytes) -> Entry:
        """Write one file of a draft; it survives a loss of power."""

    @abstractmethod
    def publish(self, draft: F, final: F, manifest: bytes) -> None:
        """Make the draft the checkpoint `final`, which exists when this returns and not before."""

    @abstractmethod
    def remove(self, path: F) -> None:
        """Delete a checkpoint, which ceases to exist first, or a draft."""

    @abstractmethod
    def leftovers(self, folder: F) -> list[F]:
        """What saves and deletions that were cut short have left, while none is going on."""

    @abstractmethod
    def move(self, path: F, target: F) -> None:
        """Give a checkpoint the name `target`, which is free."""

    @abstractmethod
    def folders(self, folder: F) -> list[str]:
        """Names of the folders in `folder`; none if there is no such folder."""

    @abstractmethod
    def sizes(self, folder: F) -> dict[str, int]:
        """Names and bytes of the files in `folder`."""

    @abstractmethod
    def measure(self, path: F) -> Entry:
        """Read a file in chunks."""


class Local(Store[Path]):
    def draft(self, final: Path) -> Path:
        return final.with_name(f"{final.name}.tmp")

    def exists(self, final: Path) -> bool:
        return final.exists()

    def begin(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def write(self, path: Path, content: bytes) -> Entry:
        path.write_bytes(content)
        sync(path)
        return entry_of(content)

    def publish(self, draft: Path, final: Path, manifest: bytes) -> None:
        self.write(draft / MANIFEST, manifest)
        sync(draft)
        draft.rename(final)
        sync(final.parent)

    def remove(self, path: Path) -> None:
        doomed = path
        if path.suffix != ".tmp":
            doomed = self.draft(path)  # what is half deleted is not a checkpoint any more
            path.rename(doomed)
        shutil.rmtree(doomed)

    def leftovers(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.folders(folder) if re.fullmatch(r"step-\d+\.tmp", name)]

    def move(self, path: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)

    def folders(self, folder: Path) -> list[str]:
        return [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []

    def sizes(self, folder: Path) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.is_file()}

    def measure(self, path: Path) -> Entry:
        with path.open("rb", buffering=0) as file:
            return _measure(file, bytearray(2**20))


class Remote(Store[UPath]):
    def draft(self, final: UPath) -> UPath:
        return final

    def exists(self, final: UPath) -> bool:
        return is_there(final / MANIFEST)

    def begin(self, draft: UPath) -> None:
        if draft.name in self.folders(draft.parent):
            self.remove(draft)

    def write(self, path: UPath, content: bytes) -> Entry:
        path.fs.pipe_file(path.path, content)
        return entry_of(content)

    def publish(self, draft: UPath, final: UPath, manifest: bytes) -> None:
        self.write(final / MANIFEST, manifest)

    def remove(self, path: UPath) -> None:
        if is_there(path / MANIFEST):
            (path / MANIFEST).unlink()
        path.fs.rm(path.path, recursive=True)

    def leftovers(self, folder: UPath) -> list[UPath]:
        steps = [folder / name for name in self.folders(folder) if STEP.fullmatch(name)]
        return [path for path in steps if not is_there(path / MANIFEST)]

    def move(self, path: UPath, target: UPath) -> None:
        names = [name for name in self.sizes(path) if name != MANIFEST]
        for some in (names, [MANIFEST]):  # it comes last
            path.fs.copy([(path / name).path for name in some], [(target / name).path for name in some])
        self.remove(path)

    def folders(self, folder: UPath) -> list[str]:
        try:
            entries = folder.fs.ls(folder.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [_name(entry) for entry in entries if entry["type"] == "directory"]

    def sizes(self, folder: UPath) -> dict[str, int]:
        entries = folder.fs.ls(folder.path, detail=True)
        return {_name(entry): entry["size"] for entry in entries if entry["type"] == "file"}

    def measure(self, path: UPath) -> Entry:
        with path.fs.open(path.path, "rb", block_size=2**24) as file:
            return _measure(file, bytearray(2**24))  # one request each


LOCAL, REMOTE = Local(), Remote()


def store_of(folder: Folder) -> Store[Any]:
    return LOCAL if isinstance(folder, Path) else REMOTE


def entry_of(content: bytes) -> Entry:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measure(file: Any, buffer: bytearray) -> Entry:
    digest, size = hashlib.sha256(), 0
    while count := file.readinto(buffer):
        digest.update(memoryview(buffer)[:count])
        size += count
    return {"size": size, "sha256": digest.hexdigest()}


def _name(entry: dict[str, Any]) -> str:
    return entry["name"].rstrip("/").rsplit("/", 1)[-1]
