"""Checkpoints: DCP shards in one folder per step, local or behind a URL; see commit.py for when a folder is one.

    <folder>/step-50/  .metadata, *.distcp   tensors (DCP): "model.<parameter>", "optimizer.<parameter>.<state>"
                       record.json           step, counters, position in the data, model shape, mesh, versions, command
                       config.toml           the resolved config
                       rng-<rank>.pt         random state of each rank
                       manifest.json         size and sha256 of all of these

Names and values do not depend on the mesh: any composition loads what any other has saved, bit by bit. None is ever
written over. saver.py saves in the background.
"""

import io
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial as bind
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_like.checkpoint.commit import (
    CheckpointError,
    commit,
    find_damage,
    list_steps,
    step_folder,
    uncommitted_steps,
)
from titan_like.checkpoint.dcp_files import Group, dcp_save, reader
from titan_like.checkpoint.storage import Entry, Folder, is_there, store_of
from titan_like.config.errors import ConfigError
from titan_like.quantize.float8 import plain

__all__ = ["CheckpointError", "choose_step", "find_damage", "list_steps", "load", "read_record", "save"]
logger = logging.getLogger(__name__)

Writer = Callable[[dict[str, Tensor], Any, Group], dict[str, Entry]]


class Named(Protocol):
    """A module, or what parallel/apply.py makes of it."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def model_tensors(model: Named) -> dict[str, Tensor]:
    """Parameters by name; a table with two copies here once."""
    return {f"model.{name}": plain(copies[0].detach()) for name, copies in _copies(model).items()}


def optimizer_tensors(model: Named, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state keyed by parameter name, so that it does not depend on the order or the mesh."""
    return {
        f"optimizer.{name}.{key}": value
        for name, copies in _copies(model).items()
        for key, value in optimizer.state.get(copies[0], {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def copy_tied(model: Named, optimizer: torch.optim.Optimizer) -> None:
    """After a load: give the second copy of a tied table what the first got; V-shaped pipelines have both here."""
    for first, *others in _copies(model).values():
        for other in others:
            other.copy_(first)
            for key, value in optimizer.state.get(first, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[other][key].copy_(value)


def _copies(model: Named) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(name, []).append(parameter)
    return found


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


def choose_step(folder: Folder, resume: str | int, *, verify: bool = True) -> int | None:
    """The step that `checkpoint.resume` means here, None for a fresh start; the same on every rank; collective.

    Looks at the files, with `verify` at every byte, each rank at its share. With "auto" a damaged checkpoint is named
    and passed over.

    Raises:
        ConfigError: a step was asked for that is not there.
        CheckpointError: it is damaged, or with "auto" all are.
    """
    if resume == "never":
        return None
    if not verify:
        logger.warning("checkpoint.verify is off: files are compared by size only")
    steps, uncommitted = from_rank_0((list_steps(folder), uncommitted_steps(folder)))
    if resume != "auto":
        if resume not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"checkpoint.resume is {resume}, but {folder} has the steps {there}; choose one or use auto"
            )
        require_intact(folder, int(resume), verify=verify)
        return int(resume)
    for step in uncommitted:
        logger.error("passed over: %s has no manifest, so it is not a complete checkpoint", step_folder(folder, step))
    for step in reversed(steps):
        try:
            require_intact(folder, step, verify=verify)
        except CheckpointError as error:
            logger.error("DAMAGED CHECKPOINT passed over: %s", error)
        else:
            return step
    if steps or uncommitted:
        raise CheckpointError(
            f"no checkpoint in {folder} is intact (see above); restore one, or start anew with checkpoint.resume never"
        )
    return None


def require_intact(folder: Folder, step: int, *, verify: bool = True) -> None:
    """Collective where there is a process group, each rank reading its share of the files.

    Raises:
        CheckpointError: a file differs from the manifest; names each.
    """
    path = step_folder(folder, step)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = find_damage(path, hashes=verify, part=rank, parts=ranks)
    if dist.is_initialized():
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, found)
        found = list(dict.fromkeys(problem for problems in gathered for problem in problems))
    if found:
        raise CheckpointError("; ".join(found))


def read_record(folder: Folder, step: int) -> dict[str, Any]:
    """What the checkpoint says of itself; see the module docstring.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = step_folder(folder, step) / "record.json"
    try:
        return json.loads(path.read_text("utf-8"))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def save(
    folder: Folder,
    step: int,
    tensors: dict[str, Tensor],
    record: Mapping[str, Any],
    config_toml: str,
    *,
    rng: dict[str, Any] | None = None,
    group: Group = None,
    write: Writer | None = None,
) -> None:
    """Write one checkpoint; collective. It is committed when this returns.

    Args:
        rng: this rank's random state, default: as it is now.
        group: of all ranks; used by nothing else at the same time. Must be able to move CPU tensors.
        write: (tensors, folder, group) -> the files that this rank has written; default: dcp_save.
    Raises:
        CheckpointError: on every rank, with the path and the reason; earlier checkpoints are untouched.
    """
    store, final = store_of(folder), step_folder(folder, step)
    draft = store.draft(final)
    rank = dist.get_rank(group)
    every_rank = bind(_together, group, f"the checkpoint of step {step} could not be written to {final}")
    if every_rank(lambda: rank == 0 and store.exists(final))[0]:
        raise CheckpointError(f"{final} exists and is never written over; choose another folder")

    def write_here() -> dict[str, Entry]:
        files = (write or dcp_save)(tensors, draft, group)  # agrees on its errors, so it comes first
        state = io.BytesIO()
        torch.save(rng or random_state(), state)
        return {**files, f"rng-{rank}.pt": store.write(draft / f"rng-{rank}.pt", state.getvalue())}

    def finish(files: dict[str, Entry]) -> None:
        if rank != 0:
            return
        texts = {"config.toml": config_toml, "record.json": json.dumps({"step": step, **record}, indent=1)}
        for name, text in texts.items():
            files[name] = store.write(draft / name, text.encode())
        commit(draft, final, step, files)

    try:
        every_rank(lambda: rank == 0 and store.begin(draft))
        files = {name: entry for found in every_rank(write_here) for name, entry in found.items()}
        every_rank(lambda: finish(files))
    except CheckpointError:
        if rank == 0:
            with suppress(Exception):
                store.remove(draft)  # a full disk needs the room
        raise


def _together(group: Group, message: str, action: Callable[[], Any]) -> list[Any]:
    """Results of `action` by rank, or an error on every rank if it failed on any: nobody waits for one that gave up."""
    result: Any = None
    reason, cause = "", None
    try:
        result = action()
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is a BaseException
        reason, cause = _reason(error), error
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (result, reason), group=group)
    failed = {rank: reason for rank, (_, reason) in enumerate(gathered) if reason}
    if failed:
        rank = min(failed)
        where = f" (rank {rank})" if len(gathered) > 1 else ""
        raise CheckpointError(f"{message}: {failed[rank]}{where}") from cause
    return [result for result, _ in gathered]


def load(folder: Folder, step: int, tensors: dict[str, Tensor], *, rng: bool, verify: bool = True) -> None:
    """Read the values of `tensors` in place, and this rank's random state; collective where there is a process group.

    Args:
        verify: compare the contents of all files with the manifest first.
    Raises:
        CheckpointError: a file is damaged; a tensor is missing, of another shape or dtype, or unreadable.
    """
    path = step_folder(folder, step)
    if verify:
        require_intact(folder, step)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # generate.py loads without a group
            _check_fit(path, tensors)
            dcp.load(tensors, storage_reader=reader(path))
        if rng:
            _load_random_state(path / f"rng-{dist.get_rank()}.pt")
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(f"{path} could not be loaded: {_reason(error)}") from error


def _load_random_state(path: Folder) -> None:
    if is_there(path):
        set_random_state(torch.load(io.BytesIO(path.read_bytes()), weights_only=True))
    else:
        rank = dist.get_rank()
        logger.warning("%s has no random state for rank %d; it keeps that of its seed", path.parent, rank)


def _check_fit(path: Folder, tensors: dict[str, Tensor]) -> None:
    """DCP itself stops at the first missing tensor and casts to another dtype without a word."""
    saved = reader(path).read_metadata().state_dict_metadata
    problems = []
    for name, tensor in tensors.items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata):
            problems.append(f"{name} is not in it")
        elif (there.size, there.properties.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"{name} is {tuple(there.size)} {there.properties.dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("; ".join(problems[:3]) + more)


def from_rank_0(value: Any) -> Any:
    """Rank 0's value on every rank; collective where there is a process group."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _reason(error: BaseException) -> str:
    """The first rank's own error; as a text, DCP's wrapper is a page of traceback per rank."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return f"{error}" or type(error).__name__


def random_state() -> dict[str, Any]:
    """Of torch (CPU and this process's GPU), Python and NumPy; in types that torch.load reads with weights_only."""
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


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
