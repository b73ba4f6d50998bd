"""The loss: the head's product and the cross entropy in one, chunk by chunk over the tokens.

Logits exist for one chunk at a time, [tokens, vocabulary] never does. The gradients of the hidden states and of the
head's table are made in the forward, where a chunk's logits are at hand; the backward hands them out. The loss is a sum
over labels: step.py gives the factor of each, 1 / (valid labels of the whole optimizer step).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from titan_like.config.schema import Training

IGNORED = -100  # the label that never counts
# Renamed in torch 2.13; 2.11 has the second name only.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


@dataclass(frozen=True)
class Vocabulary:
    """A rank's part of the vocabulary: the rows from `start` on; the ranks of the process group `group` share it."""

    start: int
    group: str


def chunk_loss(
    hidden: Tensor,  # (C, D)
    table: Tensor,  # (V, D)
    labels: Tensor,  # (C,) int64
    factors: Tensor,  # (C,) fp64, 0 where no label counts
    z_loss: float,
    part: Vocabulary | None,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor | None]:  # () fp64; (C, V) in the dtype of `hidden`, of the logits
    """Loss of one chunk, and its gradient; in fp32 (fp64 for fp64) between the products."""
    logits = hidden @ table.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    column = labels - part.start if part else labels
    # Without parts, a label that is no row fails below, as an index.
    is_here = (column >= 0) & (column < len(table)) if part else labels != IGNORED
    column = torch.where(is_here, column, 0)[:, None]
    target = torch.where(is_here, logits.gather(1, column).squeeze(1), 0.0).to(wide)
    largest = logits.amax(1).to(wide)
    probabilities = F.softmax(logits, 1, dtype=wide)
    del logits
    own = log_z = largest - probabilities.amax(1).log()
    if part:
        both = torch.stack([own, target])[None]
        everywhere = _all_gather(both, 0, part.group)  # type: ignore[arg-type]  # (ranks, 2, C)
        log_z, target = everywhere[:, 0].logsumexp(0), everywhere[:, 1].sum(0)
    loss = ((log_z - target + z_loss * log_z.square()) * factors).sum()
    if not wants_gradient:
        return loss, None
    slope = (factors * (1 + 2 * z_loss * log_z) * (own - log_z).exp()).to(wide)[:, None]
    at_target = probabilities.gather(1, column) * slope - torch.where(is_here, factors, 0.0).to(wide)[:, None]
    if probabilities.dtype == hidden.dtype:
        gradient = probabilities.mul_(slope)
    else:
        gradient = torch.mul(probabilities, slope, out=torch.empty_like(probabilities, dtype=hidden.dtype))
    return loss, gradient.scatter_(1, column, at_target.to(gradient.dtype))


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Weighted sum of the cross entropies of a linear head, in nats.

    Attributes:
        chunks: (tokens, D) -> number of chunks.
        z_loss: while training, z_loss x (log of the softmax's denominator)^2 is added to the loss of each label
            (arXiv:2204.02311, section 5).
        part: the part of the vocabulary that the table here holds; None: all. It costs one small collective per chunk.
        chunk_loss: the function above, or one that was compiled from it.
    """

    chunks: Callable[[int, int], int] = Training().chunks_of
    z_loss: float = 0.0
    part: Vocabulary | None = None
    chunk_loss: Callable[..., tuple[Tensor, Tensor | None]] = chunk_loss

    def __call__(
        self,
        hidden: Tensor,  # (B, S, D)
        table: Tensor,  # (V, D), or this rank's rows
        labels: Tensor,  # (B, S) int64, IGNORED where no label counts
        factors: Tensor | None = None,  # of each label; fp64, broadcasts to (B, S); None: 1
    ) -> Tensor:  # () fp64, the same on all ranks that share the vocabulary
        """Products in the dtype of `hidden`, the rest in fp32; the table's gradient is added up in fp32.

        Ignored labels cost nothing on a CPU; elsewhere their number is not known without waiting for the device, so
        they are computed and count 0. Under torch.no_grad() no gradient is made, and z_loss does not count.
        """
        factors = torch.ones((), dtype=torch.float64, device=labels.device) if factors is None else factors
        factors = torch.where(labels != IGNORED, factors, 0.0)
        tokens = (hidden.flatten(0, 1), table, labels.flatten(), factors.flatten())
        loss: Tensor = _ChunkedLoss.apply(*tokens, self, torch.is_grad_enabled())
        return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, labels: Tensor, factors: Tensor, how: LinearCrossEntropy, trains: bool
    ) -> Tensor:
        of_hidden, of_table = (trains and needed for needed in ctx.needs_input_grad[:2])
        shape, size = hidden.shape, -(-len(hidden) // how.chunks(*hidden.shape))
        hidden, table = hidden.detach(), table.detach()  # else slices and copies would be compiled apart
        rows = _valid_rows(labels)
        if rows is not None:
            hidden, labels, factors = hidden[rows], labels[rows], factors[rows]
        wide = hidden.dtype if len(hidden) <= size else torch.promote_types(hidden.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_table: Tensor | None = None
        total = factors.new_zeros(())
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            loss, gradient = how.chunk_loss(
                hidden[part], table, labels[part], factors[part], how.z_loss * trains, how.part, of_hidden or of_table
            )
            total += loss
            if gradient is not None and d_hidden is not None:
                torch.mm(gradient, table, out=d_hidden[part])
            if gradient is not None and of_table:
                d_table = _add_product(d_table, gradient, hidden[part], wide)
            del gradient  # or it would live while the next chunk's logits are made
        if rows is not None and d_hidden is not None:
            d_hidden = d_hidden.new_zeros(shape).index_copy_(0, rows, d_hidden)
        if of_table:
            d_table = torch.zeros_like(table) if d_table is None else d_table.to(table.dtype)
        ctx.save_for_backward(d_hidden, d_table)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline schedule that splits the backward comes here twice.
        gradients = [None if saved is None else saved * grad for saved in ctx.saved_tensors]
        return *gradients, None, None, None, None


def _valid_rows(labels: Tensor) -> Tensor | None:
    """The tokens whose label counts, (T,) -> (n,) int64; None: all do, or the device would have to be waited for.

    Fake tensors are of another type, and have no values to look at.
    """
    if type(labels) is not Tensor or labels.device.type != "cpu":
        return None
    rows = (labels != IGNORED).nonzero().squeeze(1)
    return None if len(rows) == len(labels) else rows


def _add_product(total: Tensor | None, gradient: Tensor, hidden: Tensor, wide: torch.dtype) -> Tensor:
    """total + gradient^T hidden, in `wide`, in place."""
    if total is not None and wide == hidden.dtype:
        return total.addmm_(gradient.T, hidden)
    product = gradient.T @ hidden
    return product.to(wide) if total is None else total.add_(product)
