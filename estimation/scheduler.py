"""The order in which inductor runs kernels: which become one, and the order that needs least memory.

Source: torch 2.13, _inductor/scheduler.py (fuse_nodes, topological_sort_schedule, decide_inplace_update) and
_inductor/memory.py (reorder_for_peak_memory): the best of the order as written and three others.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from estimation.inductor import Kernel, Size, bytes_of

GIVEN = {"x", "dx out"}  # which stay, or are not counted as inputs
FARTHEST = 64  # operations between kernels that become one though neither needs the other


def scheduled(program: Sequence[Kernel], inputs: Mapping[str, Size], stays: Iterable[str]) -> list[Kernel]:
    """The kernels of a program in the order in which they run.

    Args:
        program: kernels as they are written, each after those that it needs.
        inputs: what may be freed when it is read for the last time.
        stays: results of the program.
    """
    kept = frozenset(stays)
    nodes = [_Node([program[index] for index in group]) for group in _groups(program, inputs)]
    graph = _Graph(nodes, inputs, kept).sorted()
    orders = (range(len(nodes)), graph.least_first(), graph.oldest_first(), graph.smallest_first())
    return _placed([graph.nodes[index] for index in min(orders, key=graph.peak)], inputs, kept)


# As they are written


def as_needed(program: Sequence[Kernel], again: set[str], inlined: Mapping[str, tuple[str, ...]]) -> Iterator[Kernel]:
    """A backward, what it makes `again` right before the first that needs it (torch: _functorch/partitioners.py,
    reordering_to_mimic_autograd_engine).

    Args:
        inlined: what is computed wherever it is read by what is fused, of what it is made; and written for the first
            product that reads it, before the other operand of that.
    """
    waits = {name: index for index, kernel in enumerate(program) for name in kernel.makes if name in again}
    operand = list[int]()
    for index, kernel in enumerate(program):
        if again.issuperset(kernel.makes):
            continue
        following = program[min(index + 1, len(program) - 1)]
        if kernel.fused and not following.fused and not kernel.makes.keys().isdisjoint(following.reads):
            operand.append(index)
            continue
        if not operand and waits.keys().isdisjoint(kernel.reads):
            yield kernel
            continue
        needed, rest = {*operand, index}, [*operand, index]
        while rest:
            reads = _inlined(program[rest.pop()], inlined, waits).reads
            new = {waits[name] for name in reads if name in waits} - needed
            needed, rest = needed | new, [*rest, *new]
        for at in sorted(needed):
            made, reader = _inlined(program[at], inlined, waits), kernel if at in operand else program[at]
            if inlined.keys().isdisjoint(made.makes):
                late = [] if reader.fused else [name for name in reader.reads if name in inlined and name in waits]
                yield from (program[waits.pop(name)] for name in late)
                yield made
                for name in made.makes:
                    waits.pop(name, None)
        operand = []


def _inlined(kernel: Kernel, inlined: Mapping[str, tuple[str, ...]], waits: Collection[str]) -> Kernel:
    """A fused kernel that reads what others are made of, in their place; by rows, if that needs their norm."""
    if not kernel.fused or not any(name in inlined and name in waits for name in kernel.reads):
        return kernel
    reads = dict.fromkeys(
        x for name in kernel.reads for x in (inlined[name] if name in inlined and name in waits else (name,))
    )
    is_row = kernel.loops and not kernel.total and any(name.endswith(".rstd") for name in reads)
    return replace(kernel, reads=tuple(reads), loops=("rows", *kernel.loops[1:]) if is_row else kernel.loops)


# Which kernels become one


def _groups(program: Sequence[Kernel], inputs: Mapping[str, Size]) -> list[list[int]]:
    """Kernels with the same loops that read the same, or each other's results, become one, unless what one of them
    makes has to pass through others first, or is a total."""
    maker = {name: index for index, kernel in enumerate(program) for name in kernel.makes}
    needs = [{maker[name] for name in kernel.reads if name in maker} for kernel in program]
    before = list[int]()  # all that a group needs, as bits; groups go by their first member
    for needed in needs:
        bits = 0
        for index in needed:
            bits |= before[index] | 1 << index
        before.append(bits)
    group = list(range(len(program)))
    ends = [*accumulate(kernel.count for kernel in program)]
    spans = [(end - kernel.count + 1, end) for kernel, end in zip(program, ends, strict=True)]
    members = [1 << index for index in group]
    for pair in _pairs(program, inputs, ends):
        one, other = sorted(group[index] for index in pair)
        both, above = members[one] | members[other], before[one] | before[other]
        if one == other:
            continue
        between = above & ~both & -(both & -both)  # only what comes after the first of them may need it
        if between and any(before[root] & both for root in {group[index] for index in _bits(between)}):
            continue
        if any(program[need].total and both >> need & 1 for index in _bits(both) for need in needs[index]):
            continue
        is_needed = before[one] & members[other] or before[other] & members[one]
        (first, second), (third, last) = spans[one], spans[other]
        if not is_needed and max(last - first, second - third) > FARTHEST:
            continue
        spans[one] = (min(first, third), max(second, last))
        for index in _bits(members[other]):
            group[index] = one
        members[one], before[one] = both, above & ~both
        for root in {*group} - {one}:  # whoever needs one of them needs all
            if before[root] & both:
                before[root] |= both | above
    return [[*_bits(members[root])] for root in sorted({*group})]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _pairs(program: Sequence[Kernel], inputs: Mapping[str, Size], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Of kernels with the same loops: those first that share most bytes, of these those that are near each other. A
    total joins what comes before it, and last."""
    sizes = {name: bytes_of(size) for name, size in inputs.items()}
    sizes |= {name: bytes_of(size) for kernel in program for name, size in kernel.makes.items()}
    alike, found = dict[object, list[int]](), list[tuple[bool, int, int, int, int]]()
    for index, kernel in enumerate(program):
        earlier = alike.setdefault(kernel.loops, []) if kernel.loops else []
        for other in earlier:
            shared = {*program[other].names} & {*kernel.reads}
            if shared and (kernel.total or not program[other].total):
                is_mixed = kernel.total != program[other].total
                size = sum(sizes.get(name, 1) for name in shared)
                found.append((is_mixed, -size, ends[index] - ends[other], other, index))
        earlier.append(index)
    return [(other, index) for _, _, _, other, index in sorted(found)]


# Orders


class _Node:
    """Kernels that run as one."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.makes = {name: bytes_of(size) for kernel in kernels for name, size in kernel.makes.items()}
        self.reads = dict.fromkeys(name for kernel in kernels for name in kernel.reads if name not in self.makes)
        self.size = sum(self.makes.values())


class _Graph:
    """Nodes in an order, which need each other; orders are lists of their indices."""

    def __init__(self, nodes: list[_Node], inputs: Mapping[str, Size], stays: frozenset[str]) -> None:
        self.nodes, self.inputs, self.stays = nodes, inputs, stays
        self.sizes = {name: bytes_of(size) for name, size in inputs.items()}
        self.maker, self.readers = dict[str, int](), dict[str, list[int]]()
        for index, node in enumerate(nodes):
            self.sizes |= node.makes
            self.maker |= dict.fromkeys(node.makes, index)
            for name in node.reads:
                self.readers.setdefault(name, []).append(index)
        self.before = [[*dict.fromkeys(self.maker[n] for n in node.reads if n in self.maker)] for node in nodes]
        self.after = [list[int]() for _ in nodes]
        for index, before in enumerate(self.before):
            for other in before:
                self.after[other].append(index)

    def sorted(self) -> "_Graph":
        """As they are written: each after all that it needs."""
        order = self._depth_first(lambda index: (0, index))
        is_sorted = all(index == at for at, index in enumerate(order))
        return self if is_sorted else _Graph([self.nodes[index] for index in order], self.inputs, self.stays)

    def peak(self, order: Sequence[int]) -> int:
        step, change = [0] * len(order), [0] * (len(order) + 1)
        for at, index in enumerate(order):
            step[index] = at
        for name, size in self.sizes.items():
            start = step[self.maker[name]] if name in self.maker else 0
            change[start] += size
            if name not in self.stays:
                readers = self.readers.get(name)
                change[(max([step[index] for index in readers]) if readers else start) + 1] -= size
        now = most = 0
        for size in change:
            now += size
            most = max(most, now)
        return most

    def least_first(self) -> list[int]:
        """Whatever fits below the highest point so far and leaves least; if nothing does, whatever makes least."""
        left = {name: len(self.readers.get(name, ())) + (name in self.stays) for name in self.sizes}
        frees = [sum(self.sizes[name] for name in node.reads if left.get(name) == 1) for node in self.nodes]
        frees = [
            freed + sum(size for name, size in node.makes.items() if not left[name])
            for freed, node in zip(frees, self.nodes, strict=True)
        ]
        now = sum(map(bytes_of, self.inputs.values()))
        most = max(now, sum(self.sizes[name] for name in self.stays))
        waits, order = [len(before) for before in self.before], list[int]()
        ready = {index for index, count in enumerate(waits) if not count}
        while ready:
            gap = most - now
            sizes = [(self.nodes[index].size, index) for index in ready]
            *_, best = min((size if size > gap else 0, size - frees[index], index) for size, index in sizes)
            ready.remove(best)
            order.append(best)
            now += self.nodes[best].size
            most = max(most, now)
            now -= frees[best]
            for other in self.after[best]:
                waits[other] -= 1
                ready |= set() if waits[other] else {other}
            for name in self.nodes[best].reads & left.keys():
                left[name] -= 1
                if left[name] == 1:
                    for reader in self.readers[name]:
                        frees[reader] += self.sizes[name]
        return order

    def oldest_first(self) -> list[int]:
        """Whatever needs what ran first."""
        waits = [len(before) for before in self.before]
        ready = [(list[int](), index) for index, count in enumerate(waits) if not count]
        step = dict[int, int]()
        while ready:
            _, best = heapq.heappop(ready)
            step[best] = len(step)
            for other in self.after[best]:
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready, (sorted(step[index] for index in self.before[other]), other))
        return list(step)

    def smallest_first(self) -> list[int]:
        """Whatever reads and makes least, after all that it needs."""
        sizes = [node.size + sum(self.sizes.get(name, 0) for name in node.reads) for node in self.nodes]
        return self._depth_first(lambda index: (sizes[index], index))

    def _depth_first(self, key: Callable[[int], tuple[int, int]]) -> list[int]:
        order = dict[int, None]()

        def visit(index: int) -> None:
            if index not in order:
                for other in sorted(self.before[index], key=key):
                    visit(other)
                order[index] = None

        for index in sorted(range(len(self.nodes)), key=key):
            visit(index)
        return list(order)


# Places


def _placed(nodes: Sequence[_Node], inputs: Mapping[str, Size], stays: frozenset[str]) -> list[Kernel]:
    """What nobody reads outside of its node stays in registers. A result is written over what its kernel alone still
    reads, if the numbers are as many and as wide."""
    outer = {name for node in nodes for name in node.reads} | stays
    sizes = {
        **inputs,
        **{name: size for node in nodes for kernel in node.kernels for name, size in kernel.makes.items()},
    }
    known = outer & (sizes.keys() | GIVEN)
    last = {name: index for index, node in enumerate(nodes) for name in node.reads}
    found, taken = list[Kernel](), {*stays}
    for index, node in enumerate(nodes):
        for kernel in node.kernels:
            over = ""
            if kernel.loops and not kernel.total and kernel.loops[0] in ("flat", "rows"):
                [(name, size)] = kernel.makes.items()
                alone = (
                    read for read in kernel.reads
                    if sizes.get(read) == size and last.get(read) == index and read not in taken and name in outer
                    and sum(read in other.reads for other in node.kernels) == 1
                )  # fmt: skip
                over = next(alone, "")
                taken.add(over)
            unseen = {name for name in kernel.makes if kernel.loops and name not in outer}
            reads = tuple(name for name in kernel.reads if name in known)
            if over or unseen or reads != kernel.reads:
                size_unseen = kernel.unseen + sum(bytes_of(kernel.makes[name]) for name in unseen)
                makes = {name: size for name, size in kernel.makes.items() if name not in unseen}
                kernel = replace(kernel, over=over, reads=reads, makes=makes, unseen=size_unseen)
            found.append(kernel)
    return found
