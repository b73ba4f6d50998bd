import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from titan_like.parallel.distributed import close_process_group, init_process_group


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one."""
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    init_process_group(torch.device("cpu"), 60)
    yield
    close_process_group()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A run in a test sends messages to the standard output of that test, which is closed after it."""
    yield
    for package in ("titan_like", "estimation"):
        logger = logging.getLogger(package)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
