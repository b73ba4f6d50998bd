"""Ground truth on the CPU: every allocation and release of torch's CPU allocator, from the profiler."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

Call = tuple[str, int]  # operation, start in nanoseconds
TRANSPORT = ("c10d::", "gloo:")


class CpuMemory:
    """A context. What the thread that enters allocates inside it, and all that is freed of this:

    Attributes:
        changes: bytes allocated (positive) and freed (negative), in order.
        peak: the largest number of live bytes.
        temporaries: largest number of bytes that one call allocated and freed itself, by operation; not in `changes`.
        transport: bytes allocated for collectives, by collective or by other threads; not in `changes`.
    """

    def __enter__(self) -> "CpuMemory":
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        torch.empty(1)  # this thread is the one that makes the first event
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        profiler: Any = self._profile.profiler
        tree = profiler.kineto_results.experimental_event_tree()
        self._found = sorted(_allocations(tree, ()), key=lambda found: found[0].start_time_ns)
        self.read(set())

    def read(self, operations: set[str]) -> None:
        """Take apart what one call of `operations` allocates and frees itself, and what collectives allocate."""
        here = self._found[0][0].start_tid
        owner: dict[int, tuple[int, int, Call]] = {}  # by address: index in changes, bytes, who allocated
        changes: list[int] = []
        inside: Counter[Call] = Counter()
        self.transport: Counter[str] = Counter()
        for event, path in self._found[1:]:
            size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
            call = next((call for call in path if call[0] in operations), ("", 0))
            gloo = next((name for name, _ in path if name.startswith(TRANSPORT)), "")
            if size > 0 and (gloo or event.start_tid != here):
                self.transport[gloo or "threads"] += size
            elif size > 0:
                owner[address] = len(changes), size, call
                changes.append(size)
            elif address in owner:
                index, size, allocated_by = owner.pop(address)
                if call[0] and call == allocated_by:
                    changes[index] = 0
                    inside[call] += size
                else:
                    changes.append(-size)
        self.changes = [size for size in changes if size]
        self.peak = max(accumulate(self.changes))
        self.temporaries: dict[str, int] = {}
        for (name, _), size in inside.items():
            self.temporaries[name] = max(self.temporaries.get(name, 0), size)


def _allocations(events: Any, path: tuple[Call, ...]) -> Iterator[tuple[Any, tuple[Call, ...]]]:
    """Allocation events, each with the calls around it, outermost first."""
    for event in events:
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                yield event, path
        else:
            is_operation = event.tag == _EventType.TorchOp and not _wraps(event, event.name)
            yield from _allocations(
                event.children, (*path, (event.name, event.start_time_ns)) if is_operation else path
            )


def _wraps(event: Any, name: str) -> bool:
    """Whether this is an operation on a tensor of Python's (float8), which runs others and itself on plain ones."""
    return any(child.name == name or _wraps(child, name) for child in event.children)
