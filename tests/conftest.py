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
