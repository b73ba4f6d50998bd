"""The texts between two stages: one file of JSON lines per task, named by its rank, complete or absent.

datatrove's writer leaves no file where a task keeps nothing, and its reader then gives the files of later tasks to
earlier ranks; here the rank is in the name.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

TRAIN, VALIDATION = "train", "validation"


class WriteTexts:
    """Writes {folder}/{rank}.jsonl, or {folder}/{side}/{rank}.jsonl for documents with a side, and passes them on."""

    def __init__(self, folder: Path, sides: tuple[str, ...] = ("",)) -> None:
        self.folder, self.sides = folder, sides

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        paths = {side: text_file(self.folder / side, rank) for side in self.sides}
        with ExitStack() as stack:
            files: dict[str, IO[str]] = {}
            for side, path in paths.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                files[side] = stack.enter_context(open(f"{path}.tmp", "w", encoding="utf-8"))
            for document in data:
                line = json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False)
                files[document.metadata.get("side", "")].write(line + "\n")
                yield document
        for path in paths.values():
            os.replace(f"{path}.tmp", path)


class ReadTexts:
    """Reads what WriteTexts has written for the same rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from datatrove.data import Document

        with open(text_file(self.folder, rank), "rb") as file:
            for line in file:
                record = json.loads(line)
                yield Document(text=record["text"], id=record["id"])


class ChooseSide:
    """Training or validation by the text alone, so that copies, also in other case or spacing, fall on one side."""

    def __init__(self, validation_fraction: float) -> None:
        self.fraction = validation_fraction

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            document.metadata["side"] = side_of(document.text, self.fraction)
            yield document


def side_of(text: str, validation_fraction: float) -> str:
    plain = " ".join(text.casefold().split())
    place = int.from_bytes(hashlib.sha256(plain.encode()).digest()[:8], "big") / 2**64
    return VALIDATION if place < validation_fraction else TRAIN


def text_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank:05d}.jsonl"


def iter_texts(folder: Path, counts: list[int], start: int, stop: int) -> Iterator[tuple[str, str]]:
    """(id, text) of documents [start, stop) in the order of all files, of which file r holds counts[r]."""
    first = 0
    for rank, count in enumerate(counts):
        low, high = max(start - first, 0), min(stop - first, count)
        if low < high:
            with open(text_file(folder, rank), "rb") as file:
                for line in islice(file, low, high):
                    record = json.loads(line)
                    yield record["id"], record["text"]
        first += count
