"""Checkpoints: DCP shards in one folder per step, written under a temporary name and committed by one rename.

    <folder>/step-50/  .metadata, *.distcp   tensors (DCP): "model.<parameter>", "optimizer.<parameter>.<state>"
                       record.json           step, counters, model shape, what the data were
                       config.toml           the resolved config
                       rng-<rank>.pt         random state of each rank

A folder without ".tmp" is complete; nothing else is listed, loaded or counted. None is ever written over.
"""

import json
import logging
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from titan_like.config.errors import ConfigError, TitanError

logger = logging.getLogger(__name__)
FORMAT = 1  # of the folder; tick if the layout above changes


class CheckpointError(TitanError):
    """A checkpoint could not be written or read."""


class Named(Protocol):
    """A module, or what parallel/apply.py makes of it."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def list_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(0|[1-9]\d*)", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match and (folder / match[0] / "record.json").is_file())


def step_to_resume(folder: Path, resume: str | int) -> int | None:
    """The step that `checkpoint.resume` means here, None for a fresh start.

    Raises:
        ConfigError: a step was asked for that is not there.
    """
    steps = list_steps(folder)
    if resume == "never":
        return None
    if resume == "auto":
        return steps[-1] if steps else None
    if resume not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"checkpoint.resume is {resume}, but {folder} has the steps {there}; choose one or use auto")
    return int(resume)


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """What the checkpoint says of itself; see the module docstring."""
    record = json.loads((folder / f"step-{step}" / "record.json").read_text())
    if record["format"] != FORMAT:
        raise ConfigError(
            f"{folder}/step-{step} has checkpoint format {record['format']}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    return record


def model_tensors(model: Named) -> dict[str, Tensor]:
    """Parameters by name, a tied table once."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_tensors(model: Named, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state keyed by parameter name, so that it does not depend on the order or the mesh."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state tensors exist, as they are before the first step: to be loaded into, and so that a checkpoint
    holds them even if no step was applied. Takes a step with zero gradients and learning rate 0, then sets it back.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def save(folder: Path, step: int, tensors: dict[str, Tensor], record: Mapping[str, Any], config_toml: str) -> None:
    """Write one checkpoint; collective. It is complete, and found by `list_steps`, when this returns.

    Raises:
        CheckpointError: the folder could not be written; earlier checkpoints are untouched.
    """
    final, partial = folder / f"step-{step}", folder / f"step-{step}.tmp"
    if final.exists():
        raise CheckpointError(f"{final} exists and is never written over; choose another job.dump_folder")
    rank = dist.get_rank()
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        torch.save(_rng_state(), partial / f"rng-{rank}.pt")
        dcp.save(tensors, checkpoint_id=partial)
        if rank == 0:
            (partial / "config.toml").write_text(config_toml)
            (partial / "record.json").write_text(json.dumps({"format": FORMAT, "step": step, **record}, indent=1))
            _sync_folder(partial)
        dist.barrier()
        if rank == 0:
            partial.rename(final)
            _fsync(folder)
        dist.barrier()
    except (OSError, dcp.api.CheckpointException) as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {final}: {_reason(error)}"
        ) from error


def load(folder: Path, step: int, tensors: dict[str, Tensor], *, rng: bool) -> None:
    """Read the values of `tensors` in place, and this rank's random state; collective.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or unreadable.
    """
    path = folder / f"step-{step}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # generate.py loads without a group
            dcp.load(tensors, checkpoint_id=path)
    except (OSError, dcp.api.CheckpointException, ValueError) as error:
        raise CheckpointError(f"{path} could not be loaded: {_reason(error)}") from error
    if not rng:
        return
    state = path / f"rng-{dist.get_rank()}.pt"
    if state.is_file():
        _set_rng_state(torch.load(state, weights_only=True))
    else:
        logger.warning("%s has no random state for rank %d; it keeps that of its seed", path, dist.get_rank())


def keep_latest(folder: Path, count: int) -> None:
    """Delete all but the newest `count` complete checkpoints (0: keep all). For one rank; a failure only warns."""
    for step in list_steps(folder)[:-count] if count else []:
        doomed = folder / f"step-{step}.tmp"  # what is half deleted is not a checkpoint any more
        try:
            (folder / f"step-{step}").rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("the old checkpoint of step %d could not be deleted: %s", step, error)


def _reason(error: BaseException) -> str:
    """The first rank's own error; as a text, DCP's wrapper is a page of traceback per rank."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        return str(error.failures[min(error.failures)][0])
    return str(error)


def _rng_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sync_folder(folder: Path) -> None:
    for entry in folder.iterdir():
        _fsync(entry)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
