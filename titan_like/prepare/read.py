"""From input files to clean documents: the plan of the work, and the step that reads a part of it.

datatrove runs any callable (documents, rank, world_size) -> documents as a pipeline step. Its own readers drop what
they cannot read with a log line; here each case is counted, or stops the run with file and line.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_like.config.errors import ConfigError
from titan_like.prepare.config import Clean, Input
from titan_like.prepare.report import Ledger
from titan_like.prepare.storage import JSONL, PARQUET, format_of, is_compressed, need, open_bytes, size_of

if TYPE_CHECKING:
    from datatrove.data import Document

PARQUET_ROWS = 256  # read at a time
BOM = "\ufeff"


@dataclass(frozen=True)
class Unit:
    """A part of a file: bytes [start, stop) of lines, or all of it (stop -1)."""

    path: str
    start: int = 0
    stop: int = -1


def plan_tasks(files: Sequence[str], settings: Input, task_bytes: int) -> list[list[Unit]]:
    """Units for each task, in the order of the files, about task_bytes each; files of lines are cut into ranges.

    Raises:
        ConfigError: a file cannot be looked at.
    """
    tasks: list[list[Unit]] = [[]]
    room = task_bytes
    for path in files:
        try:
            size = size_of(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        is_lines = kind(path, settings) == JSONL or (kind(path, settings) != PARQUET and settings.text_unit == "line")
        ranges = range(0, size, task_bytes) if is_lines and not is_compressed(path) and size > task_bytes else [0]
        for start in ranges:
            unit = Unit(path, start, min(start + task_bytes, size)) if len(ranges) > 1 else Unit(path)
            if tasks[-1] and room <= 0:
                tasks.append([])
                room = task_bytes
            tasks[-1].append(unit)
            room -= (unit.stop if unit.stop >= 0 else size) - start
    return tasks


def kind(path: str, settings: Input) -> str:
    return format_of(path) if settings.format == "auto" else settings.format


class BadInput(Exception):
    """What is wrong with one document."""

    def __init__(self, reason: str, where: str, excerpt: str, size: int) -> None:
        super().__init__(reason)
        self.reason, self.where, self.excerpt, self.size = reason, where, excerpt, size


class Reader:
    """The first step of a pipeline: the documents of this task's units, counted in the ledger."""

    def __init__(self, tasks: Sequence[Sequence[Unit]], settings: Input, clean: Clean, ledger: Ledger) -> None:
        self.tasks, self.settings, self.clean, self.ledger = tasks, settings, clean, ledger

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator["Document"]:
        from datatrove.data import Document

        for unit in self.tasks[rank]:
            for where, raw in self._whole_file(unit):
                size = len(raw) if isinstance(raw, (bytes, str)) else 0
                self.ledger.count_in(size, rank)
                try:
                    text = self._text(where, raw, unit)
                except BadInput as bad:
                    self._refuse(bad)
                    continue
                if (text := self._normalise(where, text)) is not None:
                    yield Document(text=text, id=where)

    def _whole_file(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        """(where, record) of a unit; a file that breaks in the middle is one bad record more."""
        where = unit.path
        try:
            for where, raw in self._records(unit):
                yield where, raw
        except (EOFError, OSError) as error:  # a truncated .gz raises EOFError, a damaged one OSError
            self._refuse(BadInput("damaged file", unit.path, f"{error} (after {where})", 0))
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in (
                "zlib",
                "_lzma",
                "zstandard",
                "zstd",
                "pyarrow",
                "blobfile",
            ):
                raise
            self._refuse(BadInput("damaged file", unit.path, f"{error} (after {where})", 0))

    def _records(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        """(where, bytes, or str or anything else that a Parquet cell holds)."""
        if kind(unit.path, self.settings) == PARQUET:
            yield from self._rows(unit.path)
            return
        with open_bytes(unit.path) as file:
            if kind(unit.path, self.settings) != JSONL and self.settings.text_unit == "file":
                yield unit.path, file.read()
                return
            if unit.start:
                file.seek(unit.start - 1)
                file.readline()  # the line that began before belongs to the unit before
            place = file.tell() if unit.start else 0
            for number, line in enumerate(file, 1):
                if 0 <= unit.stop <= place:
                    return
                where = f"{unit.path}@{place}" if unit.start else f"{unit.path}:{number}"
                place += len(line)
                yield where, line.rstrip(b"\r\n")

    def _rows(self, path: str) -> Iterator[tuple[str, Any]]:
        parquet = need("pyarrow.parquet", path)
        with open_bytes(path) as file, parquet.ParquetFile(file) as table:
            if self.settings.text_key not in table.schema_arrow.names:
                raise ConfigError(
                    f"{path} has no column {self.settings.text_key} but {', '.join(table.schema_arrow.names)}; "
                    "set input.text_key"
                )
            number = 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[self.settings.text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield f"{path}:{number}", value

    def _text(self, where: str, raw: Any, unit: Unit) -> str | None:
        """The text of a record, None if it says there is none."""
        is_json = kind(unit.path, self.settings) == JSONL
        text = self._decode(where, raw) if isinstance(raw, bytes) else raw
        if is_json and isinstance(text, str):
            if not text.strip(BOM + " \t"):
                return None
            try:
                record = json.loads(text.removeprefix(BOM))
            except (ValueError, RecursionError) as error:
                raise BadInput("not JSON", where, f"{text[:60]} ({error})", len(raw)) from error
            if not isinstance(record, dict):
                raise BadInput("no JSON object", where, text, len(raw))
            text = record.get(self.settings.text_key)
        if text is not None and not isinstance(text, str):
            raise BadInput(f"{self.settings.text_key} is no text", where, repr(text)[:60], 0)
        return text

    def _decode(self, where: str, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if self.settings.bad_input == "replace":
                self.ledger.repair("invalid UTF-8 replaced")
                return raw.decode(errors="replace")
            excerpt = raw[error.start : error.start + 20]
            raise BadInput("invalid UTF-8", where, f"byte {error.start}: {excerpt!r}", len(raw)) from None

    def _normalise(self, where: str, text: str | None) -> str | None:
        """Without BOM, NUL and carriage returns; None if the document is dropped."""
        if text is None or not text.strip(" \t\r\n\0" + BOM) or text.isspace():
            reason = "no text" if text is None else "empty"
            if self.settings.empty == "error":
                raise ConfigError(f'{self._place(where)}: {reason}; give it a text or set input.empty = "skip"')
            self.ledger.drop(reason, where, text or "")
            return None
        original, text = text, text.removeprefix(BOM)
        text = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.settings.bad_input != "replace":
                self._refuse(BadInput("lone surrogate", where, f"character {error.start}", 0))
                return None
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self.clean.repair:
            text = need("ftfy", "clean.repair").fix_text(text)
        if text != original:
            self.ledger.repair("characters normalised")
        return text

    def _refuse(self, bad: BadInput) -> None:
        """Count it, or stop."""
        if self.settings.bad_input == "error":
            raise ConfigError(
                f'{self._place(bad.where)}: {bad.reason}: {bad.excerpt}; correct it or set input.bad_input = "skip"'
            ) from None
        self.ledger.drop(bad.reason, bad.where, bad.excerpt, bad.size)

    def _place(self, where: str) -> str:
        """file:line, also where only the byte is known (the lines before are counted now, when it matters)."""
        path, _, place = where.rpartition("@")
        if not place.isdigit() or path not in {unit.path for units in self.tasks for unit in units if unit.start}:
            return where  # the "@" of a file name
        lines, left = 1, int(place)
        with open_bytes(path) as file:
            while left and (block := file.read(min(left, 1 << 20))):
                lines += block.count(b"\n")
                left -= len(block)
        return f"{path}:{lines}"
