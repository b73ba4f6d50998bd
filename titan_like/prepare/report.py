"""What came in, what went out, what was dropped and why: one ledger per stage and task, added up at the end."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

EXAMPLES = 3  # per reason
EXCERPT_CHARACTERS = 80
HEARTBEAT_SECONDS = 1.0


class Ledger:
    """Counts of one task; `enter` and `leave` are pipeline steps, and it is saved when the last document has left.

    Without a folder it only counts.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.counts: dict[str, Any] = {"documents_in": 0, "bytes_in": 0, "documents_out": 0, "bytes_out": 0}
        self.sides: dict[str, dict[str, int]] = {}
        self.dropped: dict[str, dict[str, Any]] = {}
        self.repaired: dict[str, int] = {}
        self._beat = 0.0

    def count_in(self, size: int, rank: int) -> None:
        """One document of `size` bytes was read."""
        self.counts["documents_in"] += 1
        self.counts["bytes_in"] += size
        if (
            self.folder and time.monotonic() - self._beat > HEARTBEAT_SECONDS
        ):  # for the progress line of another process
            self._beat = time.monotonic()
            write_atomically(self.folder / f"{rank:05d}.progress", json.dumps(self.counts))

    def drop(self, reason: str, name: str, text: str, size: int | None = None) -> None:
        """A document is left out; `text` is shown as an example."""
        entry = self.dropped.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8", "replace")) if size is None else size
        if len(entry["examples"]) < EXAMPLES:
            entry["examples"].append({"document": name, "text": text[:EXCERPT_CHARACTERS]})

    def repair(self, what: str) -> None:
        """A document was changed and kept."""
        self.repaired[what] = self.repaired.get(what, 0) + 1

    def enter(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            self.count_in(len(document.text.encode()), rank)
            yield document

    def leave(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            size = len(document.text.encode())
            side = self.sides.setdefault(document.metadata.get("side", ""), {"documents": 0, "bytes": 0})
            for counts, documents, number in (
                (self.counts, "documents_out", "bytes_out"),
                (side, "documents", "bytes"),
            ):
                counts[documents] += 1
                counts[number] += size
            yield document
        self.save(rank)

    def save(self, rank: int) -> None:
        assert self.folder
        content = {**self.counts, "sides": self.sides, "dropped": self.dropped, "repaired": self.repaired}
        write_atomically(self.folder / f"{rank:05d}.json", json.dumps(content, ensure_ascii=False))

    def excluding(self, reason: str) -> "Exclusions":
        """An exclusion writer for datatrove's blocks."""
        return Exclusions(self, reason)


class Exclusions:
    """Stands where datatrove's filters expect a writer of what they drop."""

    def __init__(self, ledger: Ledger, reason: str) -> None:
        self.ledger, self.reason = ledger, reason

    def __enter__(self) -> "Exclusions":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass  # the ledger is saved at the end of its pipeline

    def write(self, document: Any, rank: int = 0) -> None:
        self.ledger.drop(document.metadata.get("filter_reason", self.reason), document.id, document.text)


def load(folder: Path, rank: int) -> dict[str, Any]:
    """The ledger of one task."""
    return json.loads((folder / f"{rank:05d}.json").read_text())


def add_up(folder: Path) -> dict[str, Any]:
    """The sum of all ledgers of a stage, with the first examples."""
    ranks = sorted(int(path.stem) for path in folder.glob("*.json"))
    ledgers = [load(folder, rank) for rank in ranks]
    total: dict[str, Any] = {"documents_in": 0, "bytes_in": 0, "documents_out": 0, "bytes_out": 0}
    for key in total:
        total[key] = sum(ledger[key] for ledger in ledgers)
    dropped: dict[str, dict[str, Any]] = {}
    repaired: dict[str, int] = {}
    for ledger in ledgers:
        for reason, entry in ledger["dropped"].items():
            known = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
            known["documents"] += entry["documents"]
            known["bytes"] += entry["bytes"]
            known["examples"] = (known["examples"] + entry["examples"])[:EXAMPLES]
        for what, count in ledger["repaired"].items():
            repaired[what] = repaired.get(what, 0) + count
    return {**total, "dropped": dropped, "repaired": repaired}


def as_lines(stage: str, total: dict[str, Any]) -> list[str]:
    """The report of a stage for people."""
    lines = [
        f"{stage}: {total['documents_in']:,} documents ({total['bytes_in']:,} bytes) in, "
        f"{total['documents_out']:,} ({total['bytes_out']:,}) out"
    ]
    for reason, entry in sorted(total["dropped"].items(), key=lambda item: -item[1]["documents"]):
        names = ", ".join(example["document"] for example in entry["examples"])
        more = ", ..." if entry["documents"] > len(entry["examples"]) else ""
        lines.append(f"  dropped {entry['documents']:,} ({reason}): {names}{more}")
    lines += [f"  changed {count:,} ({what})" for what, count in sorted(total["repaired"].items())]
    return lines


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
