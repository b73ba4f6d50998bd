"""The order in which a pipeline rank runs forwards and backwards: torch's own tables, and their order without torch.

Actions are (kind, stage, micro-batch) with kind F forward, B backward, I and W its two halves.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

from titan_like.config.composition import stage_count
from titan_like.config.schema import SINGLE_STAGE, Config

Schedule = Literal["none", "GPipe", "1F1B", "looped"]


class Action(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


@lru_cache(maxsize=256)
def single_stage(name: str, degree: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """GPipe and 1F1B: one stage per rank."""
    forwards = [Action("F", rank, i) for i in range(micro_batches)]
    backwards = [Action("B", rank, i) for i in range(micro_batches)]
    if name == "GPipe":
        return (*forwards, *backwards)
    warm = min(micro_batches, degree - rank)  # torch: warm-up forwards, the first of the steady state included
    order = forwards[:warm]
    for i in range(micro_batches):
        order.append(backwards[i])
        if warm + i < micro_batches:
            order.append(forwards[warm + i])
    return tuple(order)


@lru_cache(maxsize=256)
def torch_tables(name: str, degree: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """What torch's schedule class runs on each rank; builds no process group."""
    from estimation.torch_schedules import compute_actions

    return compute_actions(name, degree, virtual, micro_batches)


@lru_cache(maxsize=16)
def csv_tables(path: str) -> tuple[tuple[Action, ...], ...]:
    """The rows of a schedule file; titan_like/config/pipeline_csv.py has checked them."""
    import csv

    with Path(path).open(newline="") as file:
        rows = [
            [re.fullmatch(r"(\d+)([FIWB])(\d+)", cell.strip()) for cell in cells if cell.strip()]
            for cells in csv.reader(file)
        ]
    return tuple(tuple(Action(m[2], int(m[1]), int(m[3])) for m in row if m) for row in rows)


def actions_of(config: Config) -> tuple[tuple[Action, ...], ...]:
    """The actions of every pipeline rank of one micro-batch loop; without pipelining one forward and one backward."""
    parallelism = config.parallelism
    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1:
        return ((Action("F", 0, 0), Action("B", 0, 0)),)
    if name.endswith(".csv"):
        return csv_tables(name)
    micro_batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if name in ("GPipe", "1F1B"):
        return tuple(single_stage(name, degree, rank, micro_batches) for rank in range(degree))
    return torch_tables(name, degree, stage_count(config) // degree, micro_batches)


def schedule_of(config: Config) -> Schedule:
    """Which of torch's loops runs the actions."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return "none"
    name = config.parallelism.pipeline_parallel_schedule
    return cast(Schedule, name) if name in SINGLE_STAGE else "looped"


@lru_cache(maxsize=256)
def gathered_stages(actions: tuple[Action, ...], count: int = 3) -> list[tuple[list[int], list[int]]]:
    """Before each action of a looped schedule, the stages whose weights are given back, and those asked for: the next
    `count` to run stay (torch: _add_unshard_reshard)."""
    upcoming: list[int] = []
    windows = []
    for action in reversed(actions):
        if action.stage in upcoming:
            upcoming.remove(action.stage)
        upcoming.insert(0, action.stage)
        windows.append(upcoming[:count])
    active: list[int] = []
    found: list[tuple[list[int], list[int]]] = []
    for window in reversed(windows):
        if set(window) == set(active):
            found.append(([], []))
        else:
            found.append(([s for s in active if s not in window], [s for s in window if s not in active]))
        active = window
    return found


class Step(NamedTuple):
    """An action of any micro-batch, and the stages whose weights are given back and asked for before it."""

    kind: str
    stage: int
    evicted: tuple[int, ...]
    fetched: tuple[int, ...]


@lru_cache(maxsize=256)
def rounds(actions: tuple[Action, ...], *, gathers_ahead: bool) -> list[tuple[list[Step], int]]:
    """The same as what is repeated, and how often: a steady state differs in its micro-batches alone."""
    changes = gathered_stages(actions) if gathers_ahead else [([], [])] * len(actions)
    steps = [
        Step(action.kind, action.stage, tuple(evicted), tuple(fetched))
        for action, (evicted, fetched) in zip(actions, changes, strict=True)
    ]
    letters = {step: chr(index) for index, step in enumerate(dict.fromkeys(steps))}
    text = "".join(letters[step] for step in steps)
    found, at = [], 0
    for match in re.finditer(r"(.{1,8}?)\1+|.", text, re.DOTALL):
        size = len(match[1] or match[0])
        found.append((steps[at : at + size], len(match[0]) // size))
        at = match.end()
    return found
