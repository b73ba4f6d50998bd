"""Optimizers and the learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titan_like.config.schema import LRSchedule, Optimizer


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: Optimizer) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) or plain SGD, with weight decay on matrices only, not on norms and biases."""
    parameters = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # The fused kernel of SGD knows no DTensor (torch 2.13).
    fastest = "fused" if config.name == "adamw" else "foreach"
    implementation = fastest if config.implementation == "auto" else config.implementation
    kernel = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, **kernel)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **kernel)


def update(optimizer: torch.optim.Optimizer, wanted: Tensor) -> None:
    """One step of the optimizer where `wanted`, () bool on the device; else nothing moves, not even its step count.

    Fused kernels look at `wanted` on the device, through the attribute that torch.amp.GradScaler sets for the same
    purpose; the others wait for its value.
    """
    if optimizer.defaults["fused"]:
        optimizer.found_inf = (~wanted).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif wanted:
        optimizer.step()


def lr_factor(step: int, total_steps: int, schedule: LRSchedule) -> float:
    """Multiple of the peak learning rate at `step` (1 .. total_steps): warm-up, stable, decay.

    Warm-up rises linearly and reaches 1 at its last step. The decay covers the last `decay_steps` steps (-1: all after
    warm-up) and tends to `min_lr_factor`; "1-sqrt" is the cool-down of arXiv:2405.18392.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    decay_steps = schedule.decay_steps if schedule.decay_steps >= 0 else total_steps - schedule.warmup_steps
    done = step - 1 - (total_steps - decay_steps)
    if done <= 0:
        return 1.0
    progress = min(done / decay_steps, 1.0)
    shape = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "1-sqrt": 1 - math.sqrt(progress),
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
