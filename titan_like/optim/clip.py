"""The global gradient norm over parameters that may live on different meshes."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[tuple[nn.Parameter, int]], stage_ranks: int) -> list[tuple[Tensor, int]]:
    """This rank's part of each gradient, and how many ranks hold the same values.

    Args:
        parameters: each with the number of pipeline stages that hold a copy of it.
        stage_ranks: ranks of one stage.
    """
    found = []
    for parameter, stages in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            found.append((gradient, stages * stage_ranks))
            continue
        copies = stages * stage_ranks // gradient.device_mesh.size()
        for axis, placement in enumerate(gradient.placements):
            assert not placement.is_partial(), "gradients must be reduced before they are read"
            copies *= gradient.device_mesh.size(axis) if placement.is_replicate() else 1
        found.append((gradient.to_local(), copies))
    return found


def sum_of_squares(gradients: list[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """This rank's share, () fp64: summed over all ranks it is the square of the global 2-norm."""
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, copies in gradients:
        by_copies[copies].append(gradient)
    squares = _squares_by_rows if device.type == "cpu" else _squares
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, tensors in by_copies.items():
        total += squares(tensors).sum() / copies
    return total


def _squares(tensors: list[Tensor]) -> Tensor:
    """Each one's sum of squares, (number,) fp64."""
    return torch.stack(torch._foreach_norm(tensors)).double().square()


def _squares_by_rows(tensors: list[Tensor]) -> Tensor:
    """The same on a CPU, whose kernel adds all squares up in few fp32 numbers: off by 1e-2 after 1e8 of them."""
    return torch.stack([torch.linalg.vector_norm(x, dim=-1).double().square().sum() for x in tensors])


def clip(gradients: list[tuple[Tensor, int]], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / norm), in place and without a device sync."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_([gradient for gradient, _ in gradients], factor.to(gradients[0][0].dtype))
