"""What the caching allocator takes from the device when a rank's events are replayed through its rules."""

from collections import defaultdict
from collections.abc import Iterator

from estimation.allocator import Replay, replay
from estimation.formula import RankMemory
from estimation.tape import POOLS, Event, Segment

STEPS = 2  # in the second, gaps of the first are found again


def replayed(memory: RankMemory, *, expandable: bool, capacity: int | None = None) -> Replay:
    """Two steps through the allocator.

    Args:
        expandable: expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
        capacity: bytes that the allocator can get: above it cached segments are given back; None: any number.
    """
    return replay(_sequence(memory), capacity, expandable=expandable)


def events_of(segment: Segment) -> Iterator[Event]:
    """All events of a segment, in order."""
    yield from segment.events
    for part in segment.parts:
        yield from events_of(part)


def _sequence(memory: RankMemory) -> Iterator[tuple[int, int, int, int]]:
    """(+1 or -1, number of the allocation, bytes, stream): the newest of a name is freed first, as autograd does."""
    live: dict[Event, list[int]] = defaultdict(list)
    own_streams = memory.job.profile.own_streams

    def stream_of(event: Event) -> int:
        return POOLS.index(event.pool) if own_streams else 0

    number = 0
    steps = list(memory.steps())
    count = 1 if memory.job.only_first_step else STEPS
    rounds = [[*steps, memory.update(first=step == 0)] for step in range(count)]
    for segments in ([memory.start], *rounds):
        for event in (event for segment in segments for event in events_of(segment)):
            kind = event._replace(size=abs(event.size), offset=0, term="")
            stream = stream_of(event)
            if event.size > 0:
                live[kind].append(number)
                yield 1, number, event.size, stream
                number += 1
            elif event.size:
                yield -1, live[kind].pop(), -event.size, stream
        for kind, numbers in live.items():  # the step ends: gradients are dropped
            if kind.name == "gradients" or (not memory.job.wrapped and kind.name.startswith("gradient of")):
                yield from ((-1, each, kind.size, stream_of(kind)) for each in numbers)
                numbers.clear()
