"""The loss is a sum over valid labels; step.py divides it by the number of valid labels of the whole optimizer step."""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label that never counts


def cross_entropy_sum(
    logits: Tensor,  # (B, S, V)
    labels: Tensor,  # (B, S) int64, IGNORED where no label counts
) -> Tensor:  # () fp32, in nats
    """Summed cross entropy in fp32; exactly 0, with zero gradients, where no label is valid."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="sum")


def vocab_parallel_cross_entropy_sum(
    logits: Tensor,  # (B, S, V / tp): the columns from `start` on, of this rank of `group`
    labels: Tensor,  # (B, S) int64, the same on all ranks of `group`
    start: int,
    group: str,  # name of the process group that shares the vocabulary
) -> Tensor:  # () fp32, in nats, the same on all ranks of `group`
    """`cross_entropy_sum` without ever gathering the logits (arXiv:1909.08053, section 3)."""
    return _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(0, 1), start, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: str) -> Tensor:
        logits = logits.float()
        local = labels - start
        is_here = (local >= 0) & (local < logits.shape[1])  # IGNORED is nowhere
        column = torch.where(is_here, local, 0)[:, None]
        largest = _reduce(logits.amax(1), "max", group)
        exponentials = (logits - largest[:, None]).exp()
        target = torch.where(is_here, logits.gather(1, column).squeeze(1) - largest, 0.0)
        total, target = _reduce(torch.stack([exponentials.sum(1), target]), "sum", group)
        valid = labels != IGNORED
        ctx.save_for_backward(exponentials.div_(total[:, None]), column, is_here, valid)
        return torch.where(valid, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_here, valid = ctx.saved_tensors
        gradient = probabilities.scatter_add(1, column, -is_here.float()[:, None])
        return gradient * (grad * valid)[:, None], None, None, None


def _reduce(x: Tensor, operation: str, group: str) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), operation, group))  # type: ignore[arg-type]
