"""Duplicates: exact ones by our own two steps, similar ones by datatrove's MinHash.

datatrove's exact deduplication keeps an arbitrary copy among files and holds Python tuples; its MinHash clustering
keeps the root of a union by size. Here the first copy stays, whatever the number of tasks.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.prepare.config import Dedup
from titan_like.prepare.report import Ledger

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])  # the first half of a SHA-256


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class WriteDigests:
    """The last step of cleaning: 16 bytes per document into {folder}/{rank}.digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{rank:05d}.digest", "wb") as file:
            for document in data:
                file.write(digest(document.text)[: DIGEST.itemsize])


class FindExact:
    """One task: {folder}/{rank}.drop, a byte per document of each task, 1 for all but the first of equal texts.

    Memory: about 50 bytes per document.
    """

    def __init__(self, folder: Path, tasks: int) -> None:
        self.folder, self.tasks = folder, tasks

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        parts = [np.fromfile(self.folder / f"{task:05d}.digest", DIGEST) for task in range(self.tasks)]
        digests = np.concatenate(parts)
        order = np.lexsort((digests["low"], digests["high"]))  # stable: equal ones stay in the order of the documents
        ordered = digests[order]
        drop = np.zeros(len(digests), np.uint8)
        drop[order[1:]] = ordered[1:] == ordered[:-1]
        first = 0
        for task, part in enumerate(parts):
            drop[first : first + len(part)].tofile(self.folder / f"{task:05d}.drop")
            first += len(part)


class DropExact:
    """Leaves out what FindExact has marked."""

    def __init__(self, folder: Path, ledger: Ledger | None = None) -> None:
        self.folder, self.ledger = folder, ledger

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        drop = np.fromfile(self.folder / f"{rank:05d}.drop", np.uint8)
        for document, is_copy in zip(data, drop, strict=True):
            if not is_copy:
                yield document
            elif self.ledger:
                self.ledger.drop("duplicate", document.id, document.text)


def minhash_config(settings: Dedup) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    return MinhashConfig(
        n_grams=settings.ngram, num_buckets=settings.buckets, hashes_per_bucket=settings.hashes_per_bucket
    )


class KeepFirst:
    """One task, between datatrove's MinhashDedupBuckets and MinhashDedupFilter: of each group of similar documents all
    but the first go to {output}/{rank:06d}.remove. Memory: about 300 bytes per similar document."""

    def __init__(self, pairs: Path, output: Path) -> None:
        self.pairs, self.output = pairs, output

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        first: dict[tuple[int, int], tuple[int, int]] = {}

        def root(node: tuple[int, int]) -> tuple[int, int]:
            while (up := first.setdefault(node, node)) != node:
                first[node] = first[up]
                node = up
            return node

        for path in sorted(self.pairs.glob("*.dups")):
            for task_a, document_a, task_b, document_b in struct.iter_unpack("<4I", path.read_bytes()):
                a, b = root((task_a, document_a)), root((task_b, document_b))
                first[max(a, b)] = min(a, b)
        removed: dict[int, list[int]] = {}
        for node in sorted(first):
            if root(node) != node:
                removed.setdefault(node[0], []).append(node[1])
        self.output.mkdir(parents=True, exist_ok=True)
        for task, documents in removed.items():
            (self.output / f"{task:06d}.remove").write_bytes(np.array(documents, "<u4").tobytes())
