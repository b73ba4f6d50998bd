import pytest
import torch
from torch import nn

from titan_like.config.schema import LRSchedule, Optimizer
from titan_like.optim.optimizer import build_optimizer, lr_factor, set_lr, update


def factors(total: int, **schedule: object) -> list[float]:
    return [lr_factor(step, total, LRSchedule(**schedule)) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        # done = 1 .. 4 of 5 decay steps: the first of them still runs at the peak
        ("linear", [0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.904508497, 0.654508497, 0.345491503, 0.095491503]),  # (1 + cos 36, 72, 108, 144 degrees) / 2
        ("1-sqrt", [0.552786405, 0.367544468, 0.225403331, 0.105572809]),  # 1 - sqrt(0.2, 0.4, 0.6, 0.8)
    ],
)
def test_warmup_stable_decay_by_hand(shape: str, decay: list[float]) -> None:  # R060
    found = factors(10, warmup_steps=3, decay_steps=5, decay_type=shape)
    assert found[:6] == [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]
    assert found[6:] == pytest.approx(decay, abs=1e-9)


def test_the_decay_ends_towards_min_lr_factor() -> None:
    assert factors(4, decay_steps=4, min_lr_factor=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert factors(3, decay_steps=3, min_lr_factor=1.0) == [1.0, 1.0, 1.0]


def test_default_decay_is_all_after_the_warmup_and_zero_is_none() -> None:
    assert factors(6, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert factors(3, decay_steps=0) == [1.0, 1.0, 1.0]
    assert factors(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert factors(1) == [1.0]


def toy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))  # weight (2, 3), bias (2,), norm (2,)


def test_weight_decay_on_matrices_only() -> None:
    model = toy()
    optimizer = build_optimizer(model.named_parameters(), Optimizer(weight_decay=0.5))
    decayed, free = optimizer.param_groups
    assert decayed["weight_decay"] == 0.5 and [p.shape for p in decayed["params"]] == [(2, 3)]
    assert free["weight_decay"] == 0.0 and [p.shape for p in free["params"]] == [(2,), (2,)]
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.1)
    optimizer.step()  # zero gradients: only the decay acts, by the factor 1 - 0.1 x 0.5
    for old, new, factor in zip(before, model.parameters(), (0.95, 1.0, 1.0), strict=True):
        torch.testing.assert_close(new, old * factor)


@pytest.mark.parametrize(
    "settings",
    [Optimizer(implementation=kind) for kind in ("fused", "foreach", "for-loop")] + [Optimizer(name="sgd")],
    ids=lambda settings: f"{settings.name} {settings.implementation}",
)
def test_an_update_that_is_not_wanted_moves_nothing(settings: Optimizer) -> None:
    """A bad gradient leaves weights, moments and step counts as they are, bit for bit."""
    model = toy()
    optimizer = build_optimizer(model.named_parameters(), settings)

    def state() -> list[torch.Tensor]:
        moments = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return [t.detach().clone() for t in (*model.parameters(), *moments)]

    def step(gradient: float, *, wanted: bool) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        update(optimizer, torch.tensor(wanted))
        return state()

    first = step(1.0, wanted=True)
    second = step(float("nan"), wanted=False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    third = step(1.0, wanted=True)
    assert all(t.isfinite().all() for t in third) and not torch.equal(second[0], third[0])


def test_sgd_is_a_plain_step() -> None:
    model = toy()
    optimizer = build_optimizer(model.named_parameters(), Optimizer(name="sgd", weight_decay=0.0))
    set_lr(optimizer, 0.25)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.5)


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "for-loop"])
def test_all_implementations_take_the_same_first_step(implementation: str) -> None:
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    settings = Optimizer(lr=0.1, weight_decay=0.0, implementation=implementation)
    optimizer = build_optimizer([("w", parameter)], settings)
    assert optimizer.defaults["fused"] == (implementation in ("auto", "fused"))
    parameter.grad = torch.tensor([[0.3, -0.7]])
    optimizer.step()  # Adam's first step is lr x sign(gradient)
    torch.testing.assert_close(parameter.detach(), torch.tensor([[0.9, -1.9]]))


def test_parameters_without_gradient_stay() -> None:
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = build_optimizer([("a", used), ("b", unused), ("c", frozen)], Optimizer())
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(used, torch.ones(2, 2))
    assert torch.equal(unused, torch.ones(2, 2)) and torch.equal(frozen, torch.ones(2, 2))
    assert all(p is not frozen for group in optimizer.param_groups for p in group["params"])
