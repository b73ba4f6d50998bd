"""The pipeline: every rank runs its actions in the order of torch's own tables, as soon as what they need is there."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from estimation.schedules import Action


class Ran(NamedTuple):
    """An action and when it ran, seconds."""

    action: Action
    start: float
    end: float


def simulate(
    actions: Sequence[Sequence[Action]], stages: int, seconds: Mapping[Action, float], message: float
) -> list[list[Ran]]:
    """When every action of every rank runs.

    Args:
        actions: the rows of a schedule, one per rank.
        stages: of the whole model.
        message: seconds from one rank to another; sending takes no time of the sender's.

    Raises:
        ValueError: the actions wait for each other.
    """
    home = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    done: dict[tuple[str, int, int], float] = {}
    ran: list[list[Ran]] = [[] for _ in actions]
    clock, next_of = [0.0] * len(actions), [0] * len(actions)
    left = sum(map(len, actions))
    while left:
        before = left
        for rank, row in enumerate(actions):
            for action in islice(row, next_of[rank], None):
                kind, stage, batch = action
                source, ready = _needs(kind, stage, stages), 0.0
                if source is not None:
                    arrived = done.get((*source, batch))
                    if arrived is None:
                        break
                    ready = arrived + (message if home[source[1]] != rank else 0.0)
                start = max(clock[rank], ready)
                clock[rank] = end = start + seconds[action]
                if kind != "W":
                    done["F" if kind == "F" else "B", stage, batch] = end
                ran[rank].append(Ran(action, start, end))
                next_of[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the schedule's actions wait for each other")
    return ran


def _needs(kind: str, stage: int, stages: int) -> tuple[str, int] | None:
    """(F or B, stage) whose result for the same micro-batch an action reads; None: nothing of another stage."""
    if kind == "F":
        return ("F", stage - 1) if stage else None
    if kind == "W":
        return None
    return ("B", stage + 1) if stage < stages - 1 else ("F", stage)
