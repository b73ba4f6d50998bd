"""Memory by tracing: the real model, wrapped and trained for two steps on tensors that have shapes but no memory.

Builds what one rank of a world of any size builds, through parallel/apply.py and step.py, in one process without a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode  # private; checked on torch 2.13
from torch._subclasses.fake_tensor import UnsupportedOperatorException  # private; checked on torch 2.13
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache  # private; checked on torch 2.13
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # private; checked on torch 2.13
from torch.testing._internal.distributed.fake_pg import FakeStore  # private; checked on torch 2.13

from estimation import tracker as kinds
from estimation.allocator import replay, round_up
from estimation.kernels import composites, gpu_kernels, held_messages
from estimation.tracker import Record, Tracker
from estimation.types import TRANSIENT, MemoryReport, Moment, Resident
from titan_like.config import Config
from titan_like.config.errors import TitanError
from titan_like.fake import train
from titan_like.models.flavors import resolve
from titan_like.parallel import apply
from titan_like.parallel.apply import wrap_model
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel

if TYPE_CHECKING:
    from estimation.compiled import Programs

STEPS = 2  # the second has the optimizer's state from its start
ROUNDING = 512  # bytes: the unit of the CUDA caching allocator


def trace(config: Config, world_size: int, rank: int, *, gpu: bool) -> MemoryReport:
    """What rank `rank` of `world_size` holds over two steps.

    Args:
        config: checked by config/checks.py and parallel/checks.py for this world size.
        gpu: kernels and allocator of an NVIDIA GPU; else those of the CPU, to the byte but for what kernels free
            themselves.

    Cost: one process, no collectives; seconds to a minute and less than 1 GiB for billions of parameters.

    Raises:
        TitanError: torch knows no shape function of an operator.
    """
    tracker, buffers = traced(config, world_size, rank, gpu=gpu)
    return report(tracker, world_size, rank, buffers, gpu=gpu, notes=left_out(config, gpu=gpu))


def traced(
    config: Config, world_size: int, rank: int, *, gpu: bool, programs: "Programs | None" = None
) -> tuple[Tracker, int]:
    """The events, and bytes of the buffers that were there before them.

    Args:
        programs: of compiled blocks, from traces that differ in nothing but the number of layers; it grows.
    """
    with fake_world(world_size, rank):
        model = wrap(config, programs)
        with gpu_kernels() if gpu else nullcontext(), held_messages(until_wait=gpu):
            # No shape function: no answer. torch would run the operator, on real tensors of full size.
            mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
            try:
                tracker = track(model, config, mode)
            except UnsupportedOperatorException as error:
                raise TitanError(
                    f"a trace cannot tell what the operator {error.func} makes; use --engine formula"
                ) from error
    index = model.sequence_index
    return tracker, 0 if index is None else index.nbytes


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose collectives return at once. No other group may exist."""
    _clear_sharding_prop_cache()  # DTensor remembers meshes, and with them groups that are gone
    clear_redistribute_planner_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrap(config: Config, programs: "Programs | None" = None) -> ParallelModel:
    """This rank's model on meta, its blocks compiled as estimation/compiled.py does, its loss not."""
    loss = config.compile.model_copy(update={"components": [c for c in config.compile.components if c != "loss"]})
    config = config.model_copy(update={"compile": loss})
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    mesh, device = build_mesh("cpu", config.parallelism), torch.device("cpu")
    if not config.compile.enable:
        return wrap_model(shape, config, mesh, device)
    from estimation.compiled import compile_blocks  # takes a second: inductor

    known = {} if programs is None else programs
    with patch.object(apply, "compile_blocks", partial(compile_blocks, programs=known)):
        return wrap_model(shape, config, mesh, device)


def track(model: ParallelModel, config: Config, mode: AbstractContextManager[object] | None = None) -> Tracker:
    """Train under a tracker; on real tensors where there is no fake `mode`."""
    tracker = Tracker(module_names(model), composites())
    with mode or nullcontext(), tracker.watch(), tracker:
        train(model, config, STEPS, tracker.start_training)
    return tracker


def module_names(model: ParallelModel) -> dict[nn.Module, str]:
    return {module: name or "decoder" for part in model.parts for name, module in part.named_modules()}


def report(
    tracker: Tracker, world_size: int, rank: int, buffers: int, *, gpu: bool, notes: tuple[str, ...] = ()
) -> MemoryReport:
    """Add the events up.

    Args:
        buffers: bytes that lay in memory before the tracker came.
    """
    sums = _Sums(buffers, ROUNDING if gpu else 1)
    for sign, record in tracker.events:
        sums.add(sign, record)
    assert sums.peak_record is not None, "a trace allocates something"
    sequence = ((sign, record.number, record.size, record.stream) for sign, record in tracker.events)
    peak = sums.peak_record
    return MemoryReport(
        rank=rank,
        world_size=world_size,
        resident=_resident(tracker, buffers),
        activations=dict(sums.activations),
        transient={kind: sums.largest[kind] for kind in TRANSIENT},
        peak_bytes=sums.peak,
        at_peak=dict(sums.at_peak),
        moment=Moment(peak.step, peak.phase, peak.module, peak.operation),
        reserved_bytes=replay(sequence).peak_reserved + buffers if gpu else sums.peak,
        not_included=(*notes, *tracker.notes),
    )


class _Sums:
    """Running sums over the events, and what they were at the peaks."""

    def __init__(self, buffers: int, unit: int) -> None:
        self._unit = unit
        self.total = self.peak = round_up(buffers, unit)
        self._now: Counter[str] = Counter({kinds.BUFFERS: self.total})
        self._by_module: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.at_peak, self.activations = +self._now, Counter[str]()
        self.peak_record: Record | None = None

    def add(self, sign: int, record: Record) -> None:
        kind, size = record.kind, sign * round_up(record.size, self._unit)
        self._now[kind] += size
        self.total += size
        if kind == kinds.ACTIVATIONS:
            self._by_module[record.module] += size
            if self._now[kind] > self.largest[kind]:
                self.activations = +self._by_module
        self.largest[kind] = max(self.largest[kind], self._now[kind])
        if self.total > self.peak:
            self.peak, self.peak_record, self.at_peak = self.total, record, +self._now


def _resident(tracker: Tracker, buffers: int) -> Resident:
    """Bytes of what is tagged, gradients being those of the first step; not rounded."""
    sums: Counter[str] = Counter()
    for sign, record in tracker.events:
        if sign > 0 and (record.tag != kinds.GRADIENTS or record.step == 1):
            sums[record.tag] += record.size
    return Resident(sums[kinds.PARAMETERS], sums[kinds.GRADIENTS], sums[kinds.STATE], buffers)


def left_out(config: Config, *, gpu: bool) -> tuple[str, ...]:
    """What the numbers of a trace do not include."""
    notes = ["temporaries that a kernel allocates and frees itself"]
    if gpu:
        notes.append("memory outside of torch's allocator: the CUDA context, NCCL, and workspaces of libraries")
    if config.compile.enable and "loss" in config.compile.components:
        notes.append("the compiled loss: it is traced uncompiled, with more copies of the logits")
    if gpu and config.compile.enable and "blocks" in config.compile.components:
        notes.append("inductor's order on GPUs: inside a block, buffers come and go as it is written for a CPU")
    if config.data.reset_attention_mask:
        notes.append("the number of documents: every row is traced as one")
    return tuple(notes)
