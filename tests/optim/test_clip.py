import math

import pytest
import torch
from torch import nn

from titan_like.optim.clip import clip, local_gradients, sum_of_squares

CPU = torch.device("cpu")


def parameters(*gradients: list[float] | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        made.append(parameter)
    return made


def clipped(made: list[nn.Parameter], max_norm: float) -> float:
    gradients = local_gradients([(parameter, 1) for parameter in made], stage_ranks=1)
    norm = sum_of_squares(gradients, CPU).sqrt()
    clip(gradients, norm, max_norm)
    return norm.item()


def test_norm_over_all_and_one_factor_for_all() -> None:
    made = parameters([3.0, 0.0], None, [0.0, 4.0])
    assert clipped(made, max_norm=1.0) == 5.0
    torch.testing.assert_close(made[0].grad, torch.tensor([0.6, 0.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(made[2].grad, torch.tensor([0.0, 0.8]), rtol=1e-6, atol=0)
    assert made[1].grad is None


def test_below_the_limit_nothing_changes_by_a_bit() -> None:
    values = [0.1, 1 / 3]
    made = parameters(values)
    clipped(made, max_norm=1.0)
    assert made[0].grad is not None and torch.equal(made[0].grad, torch.tensor(values))


def test_no_gradients_at_all() -> None:
    assert clipped(parameters(None, None), max_norm=1.0) == 0.0


def test_a_gradient_that_several_ranks_hold_counts_once() -> None:
    (shared,) = parameters([3.0, 4.0])
    assert sum_of_squares(local_gradients([(shared, 1)], stage_ranks=4), CPU).item() == 25.0 / 4


def test_large_and_small_gradients_do_not_overflow_the_sum() -> None:
    made = parameters(*[[1e19, 0.0]] * 4)  # the sum of the squares exceeds fp32
    assert clipped(made, max_norm=1.0) == pytest.approx(2e19, rel=1e-6)


@pytest.mark.parametrize("shape", [(4096, 4096), (2**17, 128), (128, 2**17)])
def test_the_norm_of_many_numbers_is_exact(shape: tuple[int, int]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = sum(part.double().square().sum().item() for part in parameter.grad.split(128)) ** 0.5
    assert clipped([parameter], max_norm=1e9) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_shows_in_the_norm(bad: float) -> None:
    assert not math.isfinite(clipped(parameters([1.0, bad]), max_norm=1.0))
