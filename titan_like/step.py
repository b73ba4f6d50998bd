"""The training step. Training, validation and the estimator call it; nothing else knows how micro-batches, the global
denominator, backward and clipping fit together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titan_like.loss import IGNORED
from titan_like.optim.clip import clip, local_gradients, sum_of_squares
from titan_like.optim.optimizer import update
from titan_like.parallel.mesh import Mesh
from titan_like.parallel.model import ParallelModel

# A dataclass with tokens, labels and positions (B, S) int64, and a method documents(); see data/loader.py.
Batch = Any


@dataclass(frozen=True)
class StepResult:
    """The same on every rank.

    Attributes:
        loss: mean over the valid labels of the whole optimizer step, in nats.
        grad_norm: global 2-norm before clipping.
        valid_labels: number of labels that counted.
        applied: whether the optimizer moved; it does not where no label is valid or the gradient is not finite.
    """

    loss: float
    grad_norm: float
    valid_labels: int
    applied: bool


def training_step(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], max_norm: float
) -> Tensor:
    """One optimizer step on this rank's micro-batches of the global batch.

    Returns its result on the device, (4,) fp64, for `read_results`: the step itself does not wait for the device, but
    in optimizers that are not fused (optim/optimizer.py).
    """
    results = compute_gradients(model, batches, max_norm)
    _, norm, valid_labels = results.unbind()
    applied = (valid_labels > 0) & norm.isfinite()
    apply_gradients(model, optimizer, applied)
    return torch.cat([results, applied[None]])


def read_results(results: Sequence[Tensor]) -> list[StepResult]:
    """The results of one or more training steps; waits for the device once."""
    rows = torch.stack(list(results)).tolist()
    return [StepResult(loss, norm, int(labels), bool(applied)) for loss, norm, labels, applied in rows]


def compute_gradients(model: ParallelModel, batches: Sequence[Batch], max_norm: float) -> Tensor:
    """Clipped gradients of all micro-batches; returns (loss, grad norm before clipping, valid labels), (3,) fp64."""
    batches = [model.local_batch(batch) for batch in batches]
    with record_function("collectives"):
        valid_labels = count_valid_labels(model.mesh, batches)
    loss = accumulate_gradients(model, batches, 1.0 / valid_labels.clamp(min=1))
    with record_function("clip"):
        gradients = local_gradients(model.finish_gradients(), stage_ranks=model.mesh.size() // model.mesh.degree("pp"))
        # One collective for all that the ranks must agree on.
        totals = torch.stack([sum_of_squares(gradients, loss.device), loss / model.mesh.degree("tp")])
        with record_function("collectives"):
            dist.all_reduce(totals)
        norm = totals[0].sqrt()
        clip(gradients, norm, max_norm)
    return torch.stack([totals[1], norm, valid_labels])


def apply_gradients(model: ParallelModel, optimizer: torch.optim.Optimizer, wanted: Tensor | None = None) -> None:
    """Move the weights where `wanted`, () bool on the device (None: always), and drop the gradients."""
    with record_function("optimizer"):
        if wanted is None:
            optimizer.step()
        else:
            update(optimizer, wanted)
        model.after_update()
        optimizer.zero_grad()


def accumulate_gradients(model: ParallelModel, batches: Sequence[Batch], scale: Tensor) -> Tensor:
    """Backward of all micro-batches; returns scale x this rank's summed loss, () fp64."""
    total = torch.zeros((), dtype=torch.float64, device=scale.device)
    for number, batch in enumerate(batches, start=1):
        total += model.forward_backward(batch, scale, is_last=number == len(batches))
    return total


@torch.no_grad()
def evaluation_step(model: ParallelModel, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss over all valid labels of all ranks' micro-batches, and their number. Leaves no trace in the model.

    Call it between optimizer steps only: under pipelining it would drop accumulated gradients.
    """
    totals: Tensor | None = None
    for whole in batches:
        batch = model.local_batch(whole)
        loss = model.forward(batch).double() / model.mesh.degree("tp")
        part = torch.stack([loss, (batch.labels != IGNORED).sum() / model.mesh.degree("pp", "tp")])
        totals = part if totals is None else totals + part
    model.reshard()
    if totals is None:
        raise ValueError("an evaluation needs at least one micro-batch")
    dist.all_reduce(totals)
    loss_sum, labels = totals.tolist()
    return loss_sum / max(labels, 1), round(labels)


def count_valid_labels(mesh: Mesh, batches: Sequence[Batch]) -> Tensor:
    """Valid labels of the whole optimizer step over all ranks, () fp64, before the first backward."""
    count = torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum().double()
    dist.all_reduce(count)
    return count / mesh.degree("pp", "tp")
