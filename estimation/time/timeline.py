"""The simulated step as slices on the tracks of every pipeline rank, and as a Chrome trace, which Perfetto opens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from estimation.time.overlap import Slice
from estimation.time.step import UPDATE, StepTime

WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


class RankSlice(NamedTuple):
    """A slice, seconds from the start of the step; `kind` is F, B, I, W, or R for anything else."""

    rank: int
    track: str
    name: str
    kind: str
    start: float
    seconds: float


def timeline(step: StepTime) -> Iterator[RankSlice]:
    """One loaded micro-batch and the optimizer; further ones of the same step repeat it."""
    if len(step.ran) == 1:
        yield from _units(step)
    else:
        yield from _actions(step)
    update = step.parts[UPDATE]
    end = max(row[-1].end for row in step.ran)
    for rank in range(len(step.ran)):
        yield RankSlice(rank, "compute", UPDATE, "R", end, update)


def _units(step: StepTime) -> Iterator[RankSlice]:
    for action, start, _ in step.ran[0]:
        for track, name, offset, seconds in _slices(step, action.kind):
            yield RankSlice(0, track, name, action.kind, start + offset, seconds)


def _slices(step: StepTime, kind: str) -> list[Slice]:
    return step.stages[0].run(kind, True).slices


def _actions(step: StepTime) -> Iterator[RankSlice]:
    for rank, row in enumerate(step.ran):
        for (kind, stage, batch), start, end in row:
            name = f"{WORDS[kind]} of micro-batch {batch}, stage {stage}"
            yield RankSlice(rank, "compute", name, kind, start, end - start)


def write_trace(path: Path, step: StepTime) -> None:
    """Times in microseconds; a process per pipeline rank, a thread per track."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(len(step.ran))
    ]
    events += [
        {"ph": "X", "pid": rank, "tid": track, "name": name, "cat": WORDS.get(kind, kind), "ts": 1e6 * start,
         "dur": 1e6 * seconds}
        for rank, track, name, kind, start, seconds in timeline(step)
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
