"""The lookup of tensor-parallel ranks, beyond what the oracle compares."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from estimation.trace import fake_world
from titan_like.parallel.tensor import TableRows, look_up

VOCABULARY, DIM, RANKS = 1000, 8, 4


class Largest(TorchDispatchMode):
    """Remembers the largest number of elements that an operation has made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_no_rank_makes_the_gradient_of_the_whole_vocabulary(rank):
    with fake_world(RANKS, rank):
        mesh = init_device_mesh("cpu", (RANKS,))
        table = TableRows()._apply(nn.Embedding(VOCABULARY, DIM), mesh)
        tokens = torch.arange(0, VOCABULARY, VOCABULARY // 8)[None]  # two for each rank
        with Largest() as largest:
            out = look_up(table, tokens)
            out.sum().backward()
    rows = VOCABULARY // RANKS
    gradient = table.weight.grad.to_local()
    assert out.shape == (1, len(tokens[0]) // RANKS, DIM) and gradient.shape == (rows, DIM)
    assert largest.numbers == rows * DIM
    own = tokens[0][(tokens[0] >= rank * rows) & (tokens[0] < (rank + 1) * rows)] - rank * rows
    assert gradient.any(dim=1).nonzero().flatten().tolist() == own.tolist() and len(own) == 2
