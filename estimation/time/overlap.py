"""What FSDP2 hides: the units of a stage in order, computing on one stream and gathering and reducing on another.

As torch does it: the weights of the next unit are gathered while this one computes, its gradients are reduced while the
next one computes; one reduction is in flight at a time. Gathering and reducing share a communicator, which runs one of
them at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from estimation.time.seconds import Seconds

FSDP, COPIES, CROWDED = "FSDP (exposed)", "FSDP copies", "slowed by communication"


class Work(NamedTuple):
    """One unit's pass, in seconds.

    Attributes:
        gather: its all-gather; 0: the weights are there. copy: unpacking them.
        reduce: the reduction of its gradients. pack: packing them.
    """

    name: str
    compute: float
    gather: float = 0.0
    copy: float = 0.0
    pack: float = 0.0
    reduce: float = 0.0


class Slice(NamedTuple):
    """Something on a track of a rank, seconds from the start of the pass."""

    track: str
    name: str
    start: float
    seconds: float


@dataclass
class Pass:
    """A stage's forward or backward of one micro-batch.

    Attributes:
        seconds: until all is done.
        parts: what they consist of, by kind.
    """

    seconds: float = 0.0
    parts: Seconds = field(default_factory=Seconds)
    slices: list[Slice] = field(default_factory=list)


def overlapped(units: Sequence[Work], crowding: float) -> Pass:
    """Run the units one after the other.

    Args:
        crowding: share of the multiprocessors that communication takes while it runs.
    """
    found, now, reduced = Pass(), 0.0, 0.0
    line = ready = _put(found, units[0].gather, f"gather {units[0].name}", 0.0)  # when the communicator is free again
    for unit, ahead in zip(units, [*units[1:], None], strict=True):
        waited = max(0.0, ready - now)
        now += waited + unit.copy
        if ahead is not None and ahead.gather:
            line = ready = _put(found, ahead.gather, f"gather {ahead.name}", max(line, now))
        slowed = min(crowding * max(0.0, line - now), unit.compute * crowding / (1 - crowding))
        found.slices.append(Slice("compute", unit.name, now, unit.compute + slowed))
        now += unit.compute + slowed
        if unit.reduce:
            waited += max(0.0, reduced - now)  # its buffer is needed
            now = max(now, reduced) + unit.pack
            line = reduced = _put(found, unit.reduce, f"reduce {unit.name}", max(line, now))
        else:
            now += unit.pack
        found.parts.add({FSDP: waited, CROWDED: slowed, COPIES: unit.copy + unit.pack})
    found.parts.add({FSDP: max(0.0, line - now)})
    found.seconds = max(now, line)
    return found


def _put(found: Pass, seconds: float, name: str, start: float) -> float:
    """A collective on the communication stream; returns its end."""
    if seconds:
        found.slices.append(Slice("communication", name, start, seconds))
    return start + seconds
