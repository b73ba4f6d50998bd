"""The training step in one process, against sums by hand."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.compositions import composition
from titan_like.config.schema import Optimizer
from titan_like.data.loader import Batch
from titan_like.loss import IGNORED
from titan_like.models.flavors import resolve
from titan_like.optim.optimizer import build_optimizer
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.step import accumulate_gradients, compute_gradients, read_results, training_step


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParallelModel]:
    monkeypatch.delenv("RANK", raising=False)
    init_process_group(torch.device("cpu"), 60)
    config = composition("")
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    yield build_model(shape, config, build_mesh("cpu", config.parallelism), torch.device("cpu"))
    close_process_group()


def batch_with(labels: int, seed: int) -> Batch:
    """One row of 16 tokens of which the last `labels` have a label."""
    tokens = torch.randint(0, 64, (1, 17), generator=torch.Generator().manual_seed(seed))
    wanted = tokens[:, 1:].clone()
    wanted[:, : 16 - labels] = IGNORED
    return Batch(tokens[:, :-1], wanted, torch.arange(16)[None])


def by_hand(model: ParallelModel, batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the plain mean over all labels of all batches, as one batch."""
    tokens, labels = torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches])
    part = model.parts[0]
    loss = F.cross_entropy(part(tokens, torch.arange(16).expand_as(tokens)).flatten(0, 1), labels.flatten())
    return loss.item(), list(torch.autograd.grad(loss, list(part.parameters())))


def test_every_label_counts_the_same_over_micro_batches(model: ParallelModel) -> None:
    """R001, R157: 3 and 7 labels; the mean of the two means would give the first ones more than twice the weight."""
    batches = [batch_with(3, seed=0), batch_with(7, seed=1)]
    loss, gradients = by_hand(model, batches)
    found_loss, norm, valid = compute_gradients(model, batches, max_norm=1e9).tolist()
    assert (found_loss, valid) == (pytest.approx(loss, rel=1e-6), 10)
    assert norm == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item(), rel=1e-5)
    for (name, parameter), expected in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_micro_batch_without_labels_adds_nothing(model: ParallelModel) -> None:
    """R006."""
    loss, _ = by_hand(model, [batch_with(4, seed=0)])
    found, _, valid = compute_gradients(model, [batch_with(4, seed=0), batch_with(0, seed=1)], max_norm=1e9).tolist()
    assert (found, valid) == (pytest.approx(loss, rel=1e-6), 4)


def test_a_step_without_any_label_moves_nothing(model: ParallelModel) -> None:
    optimizer = torch.optim.AdamW([p for _, p in model.named_parameters()], lr=0.1)
    before = [parameter.detach().clone() for _, parameter in model.named_parameters()]
    (result,) = read_results([training_step(model, optimizer, [batch_with(0, seed=0)], max_norm=1.0)])
    assert (result.applied, result.valid_labels, result.loss) == (False, 0, 0.0)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, model.named_parameters(), strict=True))


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: a value that is read, or a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


def test_a_step_does_not_wait_for_the_device(model: ParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_like.loss._valid_rows", lambda labels: None)  # looks at labels on a CPU only
    optimizer = build_optimizer(model.named_parameters(), Optimizer())
    batches = [batch_with(5, seed=0), batch_with(7, seed=1)]
    training_step(model, optimizer, batches, max_norm=1.0)  # the first step creates the optimizer's state
    with Waits() as found:
        result = training_step(model, optimizer, batches, max_norm=1.0)
        assert found.operations == []
        assert bool(result[3])
    assert found.operations == ["aten._local_scalar_dense.default"]


def live_tensors_per_micro_batch(model: ParallelModel, count: int) -> list[int]:
    """Tensors alive when each of `count` micro-batches begins."""
    alive = []
    part = model.parts[0]
    # By type, since isinstance would look through proxies that other tests left behind, dead ones among them.
    handle = part.register_forward_pre_hook(
        lambda *_: alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    )
    accumulate_gradients(model, [batch_with(5, seed) for seed in range(count)], torch.tensor(1.0))
    handle.remove()
    return alive


def test_no_graph_outlives_its_micro_batch(model: ParallelModel) -> None:
    """R176: what is alive does not grow with accumulation."""
    alive = live_tensors_per_micro_batch(model, 16)
    assert alive[15] <= alive[2]
