"""Traces of torch.profiler and snapshots of GPU memory at chosen steps, one file per rank.

The parts of a step carry names in a trace (torch.profiler.record_function): data, forward, backward, collectives, clip,
optimizer, validation, checkpoint; scripts/where_time_goes.py adds them up. Without profiling a name costs about 10 us,
and a step has about ten.
"""

import gzip
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titan_like.config.errors import TitanError
from titan_like.config.schema import Profiling

logger = logging.getLogger(__name__)
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
SNAPSHOT_EVENTS = 1_000_000  # allocations and frees that a snapshot looks back on; about 1 GiB of host memory


class Profiler(AbstractContextManager["Profiler"]):
    """A context around the training loop, which calls `end_step` after each step.

    Args:
        run_folder: what relative folders lie in.
        first_step: the global number of the first step inside the context.
    Raises:
        TitanError: a folder cannot be made.
    """

    def __init__(self, settings: Profiling, run_folder: Path, device: torch.device, rank: int, first_step: int) -> None:
        self._settings, self._device, self._rank, self._step = settings, device, rank, first_step
        is_chosen = not settings.profiler_ranks or rank in settings.profiler_ranks
        self._traces = run_folder / settings.save_traces_folder if settings.enable_profiling and is_chosen else None
        wants_snapshots = settings.enable_memory_snapshot and is_chosen
        self._snapshots = run_folder / settings.save_memory_snapshot_folder if wants_snapshots else None
        for folder in filter(None, (self._traces, self._snapshots)):
            _make(folder)
        self._profile: profile | None = None
        self._has_recorded = False  # a whole step since the last trace

    def __enter__(self) -> "Profiler":
        if self._traces is not None:
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            first = self._step
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])],
                schedule=lambda number: action(first + number, self._settings),
                on_trace_ready=self._write_trace,
            )
            self._profile.__enter__()
        if self._snapshots is not None:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)  # private; checked on torch 2.13
        return self

    def end_step(self) -> None:
        """The step has ended."""
        if self._snapshots is not None and self._step % self._settings.profile_freq == 0:
            self._write_snapshot("")
        self._has_recorded |= action(self._step, self._settings) in RECORDING
        self._step += 1
        if self._profile is not None:
            self._profile.step()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._profile is not None:
            self._profile.__exit__(kind, error, traceback)  # writes a trace that the end of the run has cut
        if self._snapshots is not None:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot("-out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, trace: profile) -> None:
        assert self._traces is not None
        if not self._has_recorded:
            return  # the run ended right after its last step
        self._has_recorded = False
        path = free_path(self._traces, f"step-{self._step - 1}-rank-{self._rank}", ".json.gz")
        # Given a name in .gz, torch leaves its uncompressed file behind where the other one cannot be written.
        with _aside(path) as aside, tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(raw))
            with raw.open("rb") as file, gzip.open(aside, "wb") as packed:
                file.seek(-16, os.SEEK_END)
                if not file.read().rstrip().endswith(b"}"):  # of a full disk, the profiler says nothing
                    raise OSError(f"{tempfile.gettempdir()} has no room for the whole trace")
                file.seek(0)
                shutil.copyfileobj(file, packed)

    def _write_snapshot(self, why: str) -> None:
        assert self._snapshots is not None
        path = free_path(self._snapshots, f"step-{self._step}{why}-rank-{self._rank}", ".pickle")
        with _aside(path) as aside:
            torch.cuda.memory._dump_snapshot(str(aside))


def action(step: int, settings: Profiling) -> ProfilerAction:
    """The last `profiler_active` steps of each `profile_freq` are recorded, those before them warm the profiler up."""
    left = -step % settings.profile_freq  # steps until the trace is written
    if left == 0:
        return ProfilerAction.RECORD_AND_SAVE
    if left < settings.profiler_active:
        return ProfilerAction.RECORD
    if left < settings.profiler_active + settings.profiler_warmup:
        return ProfilerAction.WARMUP
    return ProfilerAction.NONE


def free_path(folder: Path, name: str, ending: str) -> Path:
    """`name`, or `name` with the first number from 2 that is free: nothing is written over."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for one in names if not (path := folder / f"{one}{ending}").exists())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TitanError(f"the folder {folder} of [profiling] cannot be made: {error.strerror}") from error


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """Where to write what gets the name `path` once it is whole. If it cannot be written, that is no reason to end a
    run."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        yield aside
        aside.replace(path)
        logger.info("profiling: wrote %s", path)
    except (OSError, RuntimeError) as error:
        logger.warning("profiling: %s could not be written: %s", path, error)
        with suppress(OSError):
            aside.unlink()
