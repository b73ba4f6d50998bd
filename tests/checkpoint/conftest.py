"""The kinds of folders that checkpoints may lie in, each empty at the start of a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from titan_like.checkpoint.storage import Folder, locate

KINDS = ("local", "memory", "file")


def make_folder(kind: str, tmp_path: Path) -> Folder:
    """A folder of its own: file:// is the local disk, treated as an object store."""
    name = {"local": f"{tmp_path}", "memory": f"memory://bucket{tmp_path}", "file": f"file://{tmp_path}/remote"}[kind]
    return locate(name)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    yield make_folder(request.param, tmp_path)
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    yield make_folder(request.param, tmp_path)
    MemoryFileSystem.store.clear()
