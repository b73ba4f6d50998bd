"""Files that a run appends to as it goes. One that cannot be written, as on a full disk, does not end the run."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
MOST_WAITING_BYTES = 2**22  # thousands of steps


class AppendedFile:
    """Appends whole records. What cannot be written waits in memory until it can, up to `MOST_WAITING_BYTES`; later
    records are left out. When that begins and when it ends is told once.

    Raises:
        OSError: the file cannot be opened; none after that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._left_out = 0  # bytes
        self._fails = False

    def write(self, record: bytes) -> None:
        if len(self._waiting) < MOST_WAITING_BYTES:
            self._waiting += record
        else:
            self._left_out += len(record)
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]  # a disk that fills up takes a part
        except OSError as error:
            if not self._fails:
                logger.warning(
                    "%s could not be written: %s; the run goes on, and writes the rest when it can",
                    self._path, error.strerror or error,
                )  # fmt: skip
            self._fails = True
            return
        if self._fails:
            missing = f"{self._left_out} bytes are missing" if self._left_out else "nothing is missing"
            logger.warning("%s can be written again; %s", self._path, missing)
        self._fails, self._left_out = False, 0

    def close(self) -> None:
        self.write(b"")
        if missing := self._left_out + len(self._waiting):
            logger.warning("%s lacks %d bytes that could not be written", self._path, missing)
        try:
            self._file.close()
        except OSError as error:  # some network file systems write, and fail, only now
            logger.warning("%s could not be closed: %s", self._path, error.strerror or error)


class StepLog:
    """A file of JSON lines, one object with "step" each.

    Args:
        start_step: the last step that is already there; what an earlier run logged after it is dropped, so that each
            step is seen once.
    Raises:
        OSError: `path` cannot be written; what was in it is still there.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        replace_text(path, "".join(lines_up_to(path, start_step)))
        self._file = AppendedFile(path)

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(values) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def lines_up_to(path: Path, step: int) -> list[str]:
    """Complete lines of steps <= step; a line that a kill or a full disk has cut is dropped."""
    kept = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            continue
    return kept


def replace_text(path: Path, text: str) -> None:
    """All of `text` is in `path`, or what was there before."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        aside.write_text(text)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
