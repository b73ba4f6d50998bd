"""The oracle notices faults: a check that has never fired is not a check."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.compositions import composition
from titan_like.data.loader import Batch
from titan_like.oracle import Report, Tamper, launch
from titan_like.parallel.model import ParallelModel

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def scaled_gradients(model: ParallelModel, batches: list[Batch]) -> None:
    """A constant factor that an adaptive optimizer would hide."""
    for _, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def stage_left_out_of_the_norm(model: ParallelModel, batches: list[Batch]) -> None:
    """The last stage's gradients do not count."""
    if dist.get_rank() == 1:
        finish = model.finish_gradients
        object.__setattr__(model, "finish_gradients", lambda: [(p, 10**9) for p, _ in finish()])


def replica_with_other_weights(model: ParallelModel, batches: list[Batch]) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parts[0].parameters()).to_local().mul_(1.01)


def labels_shifted_by_one(model: ParallelModel, batches: list[Batch]) -> None:
    if dist.get_rank() == 1:  # the first micro-batch of rank 0 has no labels
        batches[0].labels.copy_(batches[0].labels.roll(1, dims=1))


def crash(crashes: int, seen: Path, model: ParallelModel, batches: list[Batch]) -> None:
    """The first times rank 1 is ended by a signal; `seen` counts them in bytes."""
    if dist.get_rank() == 1 and (not seen.exists() or seen.stat().st_size < crashes):
        with seen.open("a") as file:
            file.write(".")
        os.kill(os.getpid(), signal.SIGABRT)


# name -> (composition, fault or None, what must be wrong)
FAULTS: dict[str, tuple[str, Tamper | None, set[str]]] = {
    "no fault": ("shard=1 replicate=2", None, set()),
    "scaled gradients": ("tp=2", scaled_gradients, {"gradient", "grad_norm"}),
    "a stage left out of the norm": ("pp=2", stage_left_out_of_the_norm, {"grad_norm"}),
    "a replica with other weights": ("shard=1 replicate=2", replica_with_other_weights, {"grad_norm", "gradient"}),
    "labels shifted by one": ("shard=2", labels_shifted_by_one, {"loss", "gradient"}),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    cases = {name: composition(line) for name, (line, _, _) in FAULTS.items()}
    tampers = {name: tamper for name, (_, tamper, _) in FAULTS.items() if tamper is not None}
    return {report.name: report for report in launch(cases, 2, tampers)}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_seen(name: str, reports: dict[str, Report]) -> None:
    report, expected = reports[name], FAULTS[name][2]
    wrong = {key for key in ("loss", "grad_norm", "gradient") if getattr(report, key) > report.tolerance}
    assert wrong >= expected and report.is_exact == (not expected), report.table()


@pytest.mark.parametrize("crashes", [1, 9])
def test_a_crash_is_told_and_tried_once_more(crashes: int, tmp_path: Path) -> None:
    tamper = partial(crash, crashes, tmp_path / "seen")
    with pytest.warns(RuntimeWarning, match=r"(?s)a signal ended a rank of it: .*Aborted.*in crash") as told:
        (report,) = launch({"it": composition("shard=1 replicate=2")}, 2, {"it": tamper})
    assert len(told) == (tmp_path / "seen").stat().st_size == min(crashes, 2)
    assert report.is_exact == (crashes == 1), report.table()
