"""The commit protocol: a checkpoint is a folder step-N that was written as step-N.tmp and renamed once.

Its last file is manifest.json: size and sha256 of every other file, and a digest of itself. What has no manifest is no
checkpoint; what differs from its manifest is damaged. Files that the manifest does not name are the user's own.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from titan_like.config.errors import ConfigError, TitanError

logger = logging.getLogger(__name__)
FORMAT = 2  # of the folder; tick if the files, their names or their meaning change
MANIFEST = "manifest.json"
CHUNK_BYTES = 2**20

Entry = dict[str, Any]  # {"size": bytes, "sha256": hex digits} of one file


class CheckpointError(TitanError):
    """A checkpoint could not be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint on disk is not what was written."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def list_steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, ascending."""
    return [step for step in _step_folders(folder) if (step_folder(folder, step) / MANIFEST).is_file()]


def uncommitted_steps(folder: Path) -> list[int]:
    """Steps whose folder has the name of a checkpoint but no manifest, ascending."""
    return [step for step in _step_folders(folder) if not (step_folder(folder, step) / MANIFEST).is_file()]


def _step_folders(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(0|[1-9]\d*)", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match and (folder / match[0]).is_dir())


def measure(path: Path) -> Entry:
    """Size and sha256, read in chunks."""
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return {"size": size, "sha256": digest.hexdigest()}


def commit(partial: Path, final: Path, step: int, files: dict[str, Entry]) -> None:
    """Write the manifest of `files`, make all of it durable and rename; the checkpoint exists when this returns.

    Raises:
        OSError: also where a file of another rank is not here.
    """
    for name, entry in files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise OSError(f"{path} is not what a rank wrote; all nodes must share the folder")
    content = {"format": FORMAT, "step": step, "files": files}
    (partial / MANIFEST).write_text(_encode({**content, "digest": _digest(content)}))
    sync(partial / MANIFEST)
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def read_manifest(path: Path) -> dict[str, Entry]:
    """The files of the checkpoint folder `path`.

    Raises:
        DamagedError: there is no manifest, or it is not what was written here.
        ConfigError: it was written in another format.
    """
    try:
        content = json.loads((path / MANIFEST).read_text())
        digest = content.pop("digest")
    except FileNotFoundError:
        raise DamagedError(f"{path} has no {MANIFEST}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path / MANIFEST} cannot be read ({error})") from None
    if digest != _digest(content):
        raise DamagedError(f"{path / MANIFEST} does not match its own digest")
    if content["format"] != FORMAT:
        raise ConfigError(
            f"{path} has checkpoint format {content['format']}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    if path.name != f"step-{content['step']}":
        raise DamagedError(f"{path} holds the checkpoint of step {content['step']}")
    return content["files"]


def find_damage(path: Path, *, hashes: bool, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the checkpoint folder `path`, one clause per file; looks at every `parts`-th file, the largest
    first, starting with number `part`.

    Args:
        hashes: compare the contents too, not only the sizes. Reads every byte, several files at a time.
    """
    try:
        files = read_manifest(path)
    except DamagedError as error:
        return [str(error)]
    names = sorted(files, key=lambda name: (-files[name]["size"], name))[part::parts]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: _compare(path / name, files[name], hashes), names)
        return [problem for problem in found if problem]


def _compare(path: Path, expected: Entry, hashes: bool) -> str:
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path} has {size} bytes instead of {expected['size']}"
        if hashes and measure(path) != expected:
            return f"{path} has other contents than were written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def remove_leftovers(folder: Path) -> None:
    """Delete what saves and deletions that were cut short have left; for one rank, while none writes."""
    for entry in folder.glob("step-*.tmp") if folder.is_dir() else ():
        if re.fullmatch(r"step-\d+\.tmp", entry.name) and entry.is_dir():
            logger.info("removing %s, which was never completed", entry)
            shutil.rmtree(entry, ignore_errors=True)


def retain(folder: Path, latest: int, every: int) -> None:
    """Delete committed checkpoints but the newest `latest` (0: keep all) and, if `every` is not 0, those of steps that
    are multiples of it. For one rank; a failure only warns.
    """
    for step in list_steps(folder)[:-latest] if latest else []:
        if every and step % every == 0:
            continue
        doomed = folder / f"step-{step}.tmp"  # what is half deleted is not a checkpoint any more
        try:
            step_folder(folder, step).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("the old checkpoint of step %d could not be deleted: %s", step, error)


def write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: Any) -> str:
    return hashlib.sha256(_encode(content).encode()).hexdigest()


def _encode(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))  # no byte that could change without being noticed
