"""The commit protocol: what makes a folder step-N a checkpoint, and what is noticed when it is not what was written.

Its last file is manifest.json: size and sha256 of every other file, and a digest of itself. What has no manifest is no
checkpoint; what differs from its manifest is damaged. Files that the manifest does not name are the user's own.
storage.py knows how a checkpoint comes to be and ceases at once.
"""

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from titan_like.checkpoint.storage import MANIFEST, STEP, Entry, Folder, is_there, store_of
from titan_like.config.errors import ConfigError, TitanError

logger = logging.getLogger(__name__)
FORMAT = 2  # of the folder; tick if the files, their names or their meaning change


class CheckpointError(TitanError):
    """A checkpoint could not be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint on disk is not what was written."""


def step_folder(folder: Folder, step: int) -> Folder:
    return folder / f"step-{step}"


def list_steps(folder: Folder) -> list[int]:
    """Steps with a committed checkpoint, ascending.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    return [step for step, complete in _steps(folder) if complete]


def uncommitted_steps(folder: Folder) -> list[int]:
    """Steps whose folder has the name of a checkpoint but no manifest, ascending."""
    return [step for step, complete in _steps(folder) if not complete]


def _steps(folder: Folder) -> list[tuple[int, bool]]:
    try:
        found = (STEP.fullmatch(name) for name in store_of(folder).folders(folder))
        return sorted((int(match[1]), is_there(folder / match[0] / MANIFEST)) for match in found if match)
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be listed: {error}") from error


def commit(draft: Folder, final: Folder, step: int, files: dict[str, Entry]) -> None:
    """Write the manifest of `files` and make the draft the checkpoint `final`, which exists when this returns.

    Raises:
        OSError: also where a file of another rank is not here.
    """
    store = store_of(draft)
    sizes = store.sizes(draft)
    for name, entry in files.items():
        if sizes.get(name) != entry["size"]:
            raise OSError(f"{draft / name} is not what a rank wrote; all nodes must share the folder")
    content = {"format": FORMAT, "step": step, "files": files}
    store.publish(draft, final, _encode({**content, "digest": _digest(content)}).encode())


def read_manifest(path: Folder) -> dict[str, Entry]:
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
    except Exception as error:
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


def find_damage(path: Folder, *, hashes: bool, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the checkpoint folder `path`, one clause per file; looks at every `parts`-th file, the largest
    first, starting with number `part`.

    Args:
        hashes: compare the contents too, not only the sizes. Reads every byte, several files at a time.
    """
    try:
        files = read_manifest(path)
        sizes = store_of(path).sizes(path)
    except ConfigError:  # another format
        raise
    except DamagedError as error:
        return [str(error)]
    except Exception as error:
        return [f"{path} cannot be listed ({error})"]
    names = sorted(files, key=lambda name: (-files[name]["size"], name))[part::parts]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: _compare(path / name, files[name], sizes.get(name), hashes), names)
        return [problem for problem in found if problem]


def _compare(path: Folder, expected: Entry, size: int | None, hashes: bool) -> str:
    if size is None:
        return f"{path} is missing"
    if size != expected["size"]:
        return f"{path} has {size} bytes instead of {expected['size']}"
    try:
        if hashes and store_of(path).measure(path) != expected:
            return f"{path} has other contents than were written"
    except Exception as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
    return ""


def remove_leftovers(folder: Folder) -> None:
    """Delete what saves and deletions that were cut short have left; for one rank, while none writes."""
    store = store_of(folder)
    for path in store.leftovers(folder):
        logger.warning("removing %s, which was never completed", path)
        _remove(path)


def retain(folder: Folder, latest: int, every: int) -> None:
    """Delete committed checkpoints but the newest `latest` (0: keep all) and, if `every` is not 0, those of steps that
    are multiples of it. For one rank; a failure only warns.
    """
    try:
        old = list_steps(folder)[:-latest] if latest else []
    except CheckpointError as error:
        logger.warning("no old checkpoint is deleted: %s", error)
        return
    for step in old:
        if not every or step % every:
            _remove(step_folder(folder, step))


def _remove(path: Folder) -> None:
    try:
        store_of(path).remove(path)
    except Exception as error:
        logger.warning("%s could not be deleted: %s", path, error)


def _digest(content: Any) -> str:
    return hashlib.sha256(_encode(content).encode()).hexdigest()


def _encode(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))  # no byte that could change without being noticed
