"""The memory of a program that inductor has written: kernels in their order, and when buffers come and go.

A kernel is a product, attention, a collective, or one of those that are fused between two of these. Source: torch 2.13,
_inductor/codegen/wrapper.py and memory.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Size = tuple[int, int]  # numbers, bytes of each
Loops = tuple[str | int, ...]


@dataclass(frozen=True)
class Kernel:
    """
    Attributes:
        makes: results, made before anything that it reads is freed.
        over: the input whose place its last result takes.
        unseen: bytes of results that stay in registers, which inductor counts when it looks for the most.
        work: bytes that live only while it runs.
        loops: what it runs over; those that run over the same may become one (estimation/scheduler.py).
        total: it reduces all numbers to one, which none of those that it has become one with can read.
        fused: what it reads is freed when the kernels after it that are fused too have made theirs.
        takes: results may take the place of others; those of torch's own operators have memory of their own.
        gives: others may take theirs.
        count: of how many operations of inductor's it is made, in whose order it sees how far apart kernels are.
    """

    reads: tuple[str, ...]
    makes: Mapping[str, Size]
    over: str = ""
    fused: bool = False
    takes: bool = True
    gives: bool = True
    unseen: int = 0
    work: int = 0
    loops: Loops = ()
    total: bool = False
    count: int = 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.reads, *self.makes)))


def product(name: str, source: str, size: Size) -> Kernel:
    return Kernel((source,), {name: size})


def collective(name: str, source: str, size: Size) -> Kernel:
    return Kernel((source,), {name: size}, takes=False)


def fused(name: str, size: Size, *reads: str, over: str = "", loops: Loops = (), total: bool = False) -> Kernel:
    return Kernel(reads, {name: size}, over, fused=True, loops=loops, total=total)


Step = tuple[str, int]  # an allocation (bytes > 0) or a free (< 0) of what was first called so


def bytes_of(size: Size) -> int:
    return size[0] * size[1]


def steps(program: Sequence[Kernel], inputs: Mapping[str, Size], stays: Iterable[str]) -> list[Step]:
    """What a program allocates and frees, its inputs included; what stays ends under its own name, wherever it lies."""
    plan = _Plan(program, inputs, frozenset(stays))
    for index, kernel in enumerate(program):
        plan.make(index, kernel)
        plan.ends(index, kernel)
    for name in sorted(plan.stays):
        if plan.home[name] != name:
            size = bytes_of(plan.sizes[name])
            plan.found += [(plan.home[name], -size), (name, size)]
    return [step for step in plan.found if step]


class _Plan:
    """
    A result takes the place of a buffer of its size and dtype that nobody reads any more, and that so long is not given
    back: if the kernel before was the last to read it, or if the most that the program needs is no more by that (torch:
    AllocateLine.should_reuse_buffer).

    Attributes:
        home: in whose place each buffer lies.
        own: buffers whose place is not taken again: inputs, and what torch's own operators make.
        live: bytes while each kernel runs, if nothing is overwritten.
        free: what may be taken: name, the kernel that was the last to read it, where among the steps it is freed.
    """

    def __init__(self, program: Sequence[Kernel], inputs: Mapping[str, Size], stays: frozenset[str]) -> None:
        self.program, self.stays = program, stays
        self.last = {name: index for index, kernel in enumerate(program) for name in kernel.names}
        self.last |= dict.fromkeys(stays, len(program))
        self.sizes = {**inputs, **{name: size for kernel in program for name, size in kernel.makes.items()}}
        self.home, self.own = {name: name for name in self.sizes}, set(inputs)
        self.found: list[Step | None] = []
        self.free: list[tuple[str, int, int]] = []
        self._done: list[str] = []
        self.live, now = list[int](), sum(map(bytes_of, inputs.values()))
        for index, kernel in enumerate(program):
            now += sum(map(bytes_of, kernel.makes.values()))
            self.live.append(now + kernel.unseen)
            now -= sum(bytes_of(self.sizes[name]) for name in kernel.names if self.last[name] == index)
        self._most = max(self.live)

    def make(self, index: int, kernel: Kernel) -> None:
        """The results of a kernel."""
        work = [("attention at work", kernel.work)] if kernel.work else []
        self.found += work
        self.own |= set() if kernel.gives else {*kernel.makes}
        for name, size in kernel.makes.items():
            if kernel.over and name == [*kernel.makes][-1]:
                self.home[name] = self.home[kernel.over]
                self.own |= {name} if kernel.over in self.own else set()
            elif not (kernel.takes and self._take(index, name, size)):
                self.found.append((name, bytes_of(size)))
        self.found += [(name, -size) for name, size in work]

    def _take(self, index: int, name: str, size: Size) -> bool:
        """The place of another, if there is one; the newest fits best."""
        taken = next((x for x in reversed(self.free) if self.sizes[x[0]] == size), None)
        if taken is None:
            return False
        between = range(taken[1] + 1, index)
        if between and bytes_of(size) + max(self.live[i] for i in between) > self._most:
            return False
        self.free.remove(taken)
        self.found[taken[2]], self.home[name] = None, self.home[taken[0]]
        for i in between:
            self.live[i] += bytes_of(size)
        return True

    def ends(self, index: int, kernel: Kernel) -> None:
        """What it was the last to read, once all that is fused with it has run."""
        self._done += [name for name in kernel.names if self.last[name] == index and name != kernel.over]
        if kernel.fused and any(following.fused for following in self.program[index + 1 : index + 2]):
            return
        for name in self._done:
            if name not in self.own:
                self.free.append((name, index, len(self.found)))
            self.found.append((self.home[name], -bytes_of(self.sizes[name])))
        self._done = []
