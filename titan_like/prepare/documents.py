"""From files to clean, distinct documents on one side of the train/validation split."""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_like.config.errors import ConfigError

STDLIB = "stdlib"
SUFFIXES = {".py", ".txt", ".md"}
# Tests, installed packages and vendored or generated data are not the library's own source.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "pydoc_data", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    name: str  # the file it came from
    text: str  # not empty; newlines are \n


@dataclass
class Tally:
    """Documents and bytes that went in, and the names of those that were dropped, by reason."""

    documents_in: int = 0
    bytes_in: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, name: str) -> None:
        self.dropped.setdefault(reason, []).append(name)


def describe(source: str) -> str:
    """What a source is, for the manifest."""
    return f"standard library of Python {platform.python_version()}" if source == STDLIB else source


def find_files(sources: Sequence[str]) -> list[Path]:
    """The files of all sources in a fixed order, none twice.

    Raises:
        ConfigError: a source does not exist or has no text file.
    """
    files: dict[Path, None] = {}
    for source in sources:
        root = Path(sysconfig.get_path("stdlib") if source == STDLIB else source)
        found = [root] if root.is_file() else sorted(_walk(root, LEFT_OUT if source == STDLIB else frozenset()))
        if not found:
            raise ConfigError(
                f"source {source}: no such file, or no {', '.join(sorted(SUFFIXES))} file in {root}; "
                f"give '{STDLIB}', a text file or a folder"
            )
        files.update(dict.fromkeys(found))
    return list(files)


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        paths = (Path(folder, name) for name in names)
        yield from (path for path in paths if path.suffix in SUFFIXES and path.is_file())


def read(files: Iterable[Path], tally: Tally) -> Iterator[Document]:
    """One document per file, without BOM, newlines as \\n; invalid UTF-8, NULs and empty texts are dropped."""
    for path in files:
        data = path.read_bytes()
        tally.documents_in += 1
        tally.bytes_in += len(data)
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            tally.drop("invalid UTF-8", str(path))
            continue
        if "\0" in text:
            tally.drop("NUL character", str(path))
        elif not text.strip():
            tally.drop("empty", str(path))
        else:
            yield Document(str(path), text)


def deduplicate(documents: Iterable[Document], tally: Tally) -> Iterator[Document]:
    """The first of each group of equal texts."""
    seen: set[bytes] = set()
    for document in documents:
        if (digest := _digest(document.text)) in seen:
            tally.drop("duplicate", document.name)
        else:
            seen.add(digest)
            yield document


def split(documents: Iterable[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation); the side is a function of the text alone, whatever other files there are."""
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        place = int.from_bytes(_digest(document.text)[:8], "big") / 2**64
        sides[place < validation_fraction].append(document)
    return sides


def summary(tally: Tally, names_shown: int = 3) -> list[str]:
    """Lines of the report: how many were dropped and why, with a few names."""
    counts = Counter({reason: len(names) for reason, names in tally.dropped.items()})
    lines = []
    for reason, count in counts.most_common():
        names = tally.dropped[reason]
        shown = ", ".join(names[:names_shown]) + (", ..." if count > names_shown else "")
        lines.append(f"dropped {count} ({reason}): {shown}")
    return lines


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
