"""From a list of operations to allocations and frees in their order: what autograd and recompute do with it.

An event is (name, offset, bytes): bytes > 0 allocates, < 0 frees; `offset` 1 means the next unit's (embedding, block,
head). A segment sums its events up, so that a step of thousands of operations costs a few additions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from estimation.program import Op

Mode = Literal["none", "full", "op"]


class Event(NamedTuple):
    """An allocation (size > 0) or a free (size < 0)."""

    name: str
    offset: int
    size: int
    term: str
    pool: str = "main"


POOLS = ("main", "gather", "reduce")  # the streams that allocate: compute, FSDP's all-gather, FSDP's reduce-scatter
_PLACE = {pool: place for place, pool in enumerate(POOLS, start=1)}


@dataclass(frozen=True)
class Segment:
    """Events, or other segments, that run one after the other.

    Attributes:
        delta: bytes that stay when it is over: in all, and of each pool.
        rise: largest number of bytes on top of the start, at any time in it, likewise.
    """

    events: tuple[Event, ...]
    parts: tuple["Segment", ...]
    delta: tuple[int, ...]
    rise: tuple[int, ...]
    label: str = ""

    @staticmethod
    def of(events: Iterable[Event], label: str = "") -> "Segment":
        events = tuple(events)
        now, rise, total, highest = [0, 0, 0, 0], [0, 0, 0, 0], 0, 0
        for _, _, size, _, pool in events:
            index = _PLACE[pool]
            total += size
            now[index] += size
            if size > 0:
                highest = max(highest, total)
                rise[index] = max(rise[index], now[index])
        return Segment(events, (), (total, *now[1:]), (highest, *rise[1:]), label)

    @staticmethod
    def join(parts: Iterable["Segment"], label: str = "") -> "Segment":
        parts = tuple(parts)
        now, rise = [0, 0, 0, 0], [0, 0, 0, 0]
        for part in parts:
            for index in range(4):
                rise[index] = max(rise[index], now[index] + part.rise[index])
                now[index] += part.delta[index]
        return Segment((), parts, tuple(now), tuple(rise), label)

    def up_to_rise(self) -> "tuple[Counter[tuple[str, str]], str]":
        """Bytes of each (term, name) up to the highest point, and the label of the part that reaches it."""
        found: Counter[tuple[str, str]] = Counter()
        now = 0
        for index, part in enumerate(self.parts):
            if now + part.rise[0] == self.rise[0]:
                found, label = part.up_to_rise()
                found.update(Segment.join(self.parts[:index]).total())
                return found, f"{self.label} {label}".strip()
            now += part.delta[0]
        for event in self.events:
            if now == self.rise[0]:
                break
            now += event.size
            found[event.term, event.name] += event.size
        return found, self.label

    def total(self) -> "Counter[tuple[str, str]]":
        """Bytes of each (term, name) that stay."""
        found: Counter[tuple[str, str]] = Counter()
        for event in self.events:
            found[event.term, event.name] += event.size
        times = Counter(map(id, self.parts))
        for part in {id(part): part for part in self.parts}.values():
            for key, size in part.total().items():
                found[key] += size * times[id(part)]
        return found


def sizes_of(ops: Sequence[Op]) -> dict[str, int]:
    """Bytes of every tensor that `ops` make."""
    return {name: size for op in ops for name, size in (op.output, *op.extra)}


def gradients_of(ops: Sequence[Op], x_size: int) -> dict[str, int]:
    """Bytes of the gradient of every tensor that has one."""
    return {"x": x_size, **{op.output[0]: op.gradient or op.output[1] for op in ops}}


def kept(ops: Sequence[Op], mode: Mode) -> set[str]:
    """The tensors of a forward that wait for the backward."""
    if mode == "none":
        return {name for op in ops for name in op.saves}
    if mode == "full":
        return {"x"}
    return {"x"} | {name for op in ops if op.keep for name in (op.output[0], *(extra for extra, _ in op.extra))}


def forward(
    ops: Sequence[Op], x_size: int, keep: set[str], term: str, *, made: set[str] | None = None, prefix: str = ""
) -> list[Event]:
    """Allocations and frees of one pass; `made` are there already: a recomputation finds what was
    kept, and drops what no backward needs.

    Kept tensors count as `term`, all others as "forward". The last output stays: it is the next unit's "x". `x_size` is
    bytes of the input.
    """
    made, sizes = made or set(), {"x": x_size, **sizes_of(ops)}
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.inputs, *op.reads)}
    events: list[Event] = []

    def add(name: str, sign: int) -> None:
        owner, offset = ("x", 1) if name == "out" else (name if name == "x" or name in made else prefix + name, 0)
        kind = "activations" if name in made else term if name in keep or name in ("x", "out") else "forward"
        events.append(Event(owner, offset, sign * sizes[name], kind))

    for index, op in enumerate(ops):
        if op.output[0] not in made:
            if op.temporary[0]:
                events += _at_work(op, 0, 1)
            for name in (op.output[0], *(extra for extra, _ in op.extra)):
                add(name, 1)
            if op.temporary[0]:
                events += _at_work(op, 0, -1)
        for name, _ in op.extra:
            if name not in keep and name not in made:
                add(name, -1)
        for name in (*op.inputs, *op.reads):
            if last_use[name] == index and name not in keep:
                add(name, -1)
        unread = op.output[0] not in (*last_use, *keep, *made, "out")
        if unread:  # by the part of a forward that is run again
            add(op.output[0], -1)
    return events


def _at_work(op: Op, direction: int, sign: int) -> list[Event]:
    """An operation's own temporaries; direction 0 is its forward, 1 its backward."""
    size = op.temporary[direction]
    piece = op.piece or size
    event = Event(f"{op.name} at work", 0, sign * piece, ("forward", "backward")[direction])
    rest = size % piece
    return [event] * (size // piece) + ([event._replace(size=sign * rest)] if rest else [])


def recomputation(ops: Sequence[Op], early_stop: bool) -> Sequence[Op]:
    """The operations that run again: with early stop, up to the last that makes something for the backward."""
    if not early_stop:
        return [op for op in ops if op.output[0] != "out"]
    needed = {name for op in ops for name in op.saves}
    last = max(
        i for i, op in enumerate(ops)
        if op.custom or op.output[0] in needed or any(name in needed for name, _ in op.extra)
    )  # fmt: skip
    return ops[: last + 1]


def backward(
    ops: Sequence[Op], x_size: int, mode: Mode, *, early_stop: bool = True, gradient_term: str = "reduce-scatter"
) -> list[Event]:
    """Allocations and frees of a unit's backward, recomputation included.

    The gradient of the output is there as ("dx", +1) and is freed; that of "x" is left as ("dx", 0).
    """
    sizes, gradients = {"x": x_size, **sizes_of(ops)}, gradients_of(ops, x_size)
    needed = {name for op in ops for name in op.saves}
    stored = kept(ops, mode)
    events: list[Event] = []
    dropped: set[str] = set()
    if mode != "none":
        again, made = recomputation(ops, early_stop), stored - {"x"}
        events += forward(again, x_size, needed | {"x"}, "recompute", made=made, prefix="again ")
        dropped = {name for op in again for name in op.inputs} - needed
    left = Counter(name for op in ops for name in op.saves)
    late = {op.output[0] for op in ops if op.waits}
    waiting: dict[str, list[Op]] = {}
    parts: list[str] = []
    storage: dict[str, str] = {}  # whose gradient lies where: an operation that passes it on shares one
    holders: Counter[str] = Counter()

    def claim(value: str, at: str) -> None:
        storage[value] = at
        holders[at] += 1

    def release(value: str) -> None:
        at = storage.pop(value)
        holders[at] -= 1
        if not holders[at]:
            offset = 1 if at == "out" else 0
            events.append(Event("dx" if at in ("out", "x") else f"d {at}", offset, -gradients[at], "backward"))

    def free_saved(name: str) -> None:
        left[name] -= 1
        if left[name]:
            return
        if name in stored and not (mode != "none" and name == "x"):
            events.append(Event(name, 0, -sizes[name], "activations"))
        elif name not in stored:
            term = "recompute" if mode != "none" else "activations"
            events.append(Event(f"again {name}" if mode != "none" else name, 0, -sizes[name], term))

    claim("out", "out")
    for op in reversed(ops):
        if op.output[0] not in storage:  # it has no gradient: a mask
            for name in op.saves:
                free_saved(name)
            continue
        if op.temporary[1]:
            events += _at_work(op, 1, 1)
        for name in op.inputs:
            if op.passes or (op.in_place and name == op.inputs[0]):
                if name not in storage:
                    claim(name, storage[op.output[0]])
                continue
            events.append(Event("dx" if name == "x" else f"d {name}", 0, gradients[name], "backward"))
            if name in storage and storage[name] != name:  # added to a gradient that came from elsewhere
                release(name)
                claim(name, name)
            elif name in late and name in storage:  # two parts that are added where they are read
                parts.append(name)
            elif name in storage:
                events.append(Event("dx" if name == "x" else f"d {name}", 0, -gradients[name], "backward"))
            else:
                claim(name, name)
        if op.weight:
            events.append(Event(f"gradient of {op.name}", 0, op.weight, gradient_term))
        if op.bias:
            events.append(Event(f"gradient of {op.name}.bias", 0, op.bias, gradient_term))
        if op.temporary[1]:
            events += _at_work(op, 1, -1)
        until = op.waits or (op.waits_again if mode == "op" else "")
        waiting.setdefault(until or op.name, []).insert(0, op)
        for done in () if until else waiting.pop(op.name):
            release(done.output[0])
            events += [Event(f"d {name}", 0, -gradients[name], "backward") for name in parts if name == done.output[0]]
            for name in done.saves:
                free_saved(name)
    if mode != "none":
        events.append(Event("x", 0, -sizes["x"], "activations"))
        for name in stored - needed - {"x"} - dropped:  # kept by the policy, but read by nobody
            events.append(Event(name, 0, -sizes[name], "activations"))
    return events


def inputs_backward(ops: Sequence[Op], x_size: int) -> list[Event]:
    """The half of a backward that ends with the gradient of "x", without recomputation (torch: stage_backward_input).

    All that was saved stays, and so do the gradients that the weights' half starts from: those of the results of
    operations with a weight. Gradients meet in a new tensor where somebody still holds the first.
    """
    sizes = gradients_of(ops, x_size)
    events: list[Event] = []
    storage = {"out": "out"}
    holders: Counter[str] = Counter({"out": 1})
    for op in reversed(ops):
        if op.output[0] not in storage:
            continue
        if op.temporary[1]:
            events += _at_work(op, 1, 1)
        for name in op.inputs:
            if op.passes and name not in storage:
                storage[name] = storage[op.output[0]]
                holders[storage[name]] += 1
                continue
            if op.passes:
                continue
            events.append(_gradient(name, sizes[name]))
            at = storage.get(name)
            if at is None or at == name:
                events += [_gradient(name, -sizes[name])] * (at == name)
            elif holders[at] > 1:  # the sum is a third tensor
                events += [_gradient(name, sizes[name]), _gradient(name, -sizes[name])]
                holders[at] -= 1
            else:
                events.append(_gradient(at, -sizes[at]))
                holders[at] -= 1
            storage[name] = name
            holders[name] = 1
        if op.custom:
            events += [Event(f"gradient of {op.name}", 0, sign * op.weight, "backward") for sign in (1, -1)]
        if op.temporary[1]:
            events += _at_work(op, 1, -1)
        if op.held:
            events.append(Event(f"d {op.name}", 0, op.held, "backward"))
        if op.held or not op.weight:
            at = storage[op.output[0]]
            holders[at] -= 1
            if not holders[at]:
                events.append(_gradient(at, -sizes[at]))
    return events


def _gradient(at: str, size: int) -> Event:
    """What lies where the gradient of `at` was made."""
    return Event("dx" if at in ("out", "x") else f"d {at}", int(at == "out"), size, "backward")


def held_gradients(ops: Sequence[Op]) -> dict[str, str]:
    """Where the gradients lie that a backward for inputs leaves for the weights: of each operation with a weight."""
    at = {"out": "out"}
    for op in reversed(ops):
        for name in op.inputs:
            at[name] = name if not op.passes else at.get(name, at[op.output[0]])
    return {op.output[0]: at[op.output[0]] for op in ops if op.weight}


def weights_backward(
    ops: Sequence[Op], x_size: int, gradient_term: str, *, adds: bool
) -> tuple[list[Event], list[Event]]:
    """The other half: gradients of weights, in the order of the parameters (torch: stage_backward_weight).

    Args:
        adds: there is a gradient already, into which a new one is added.

    Returns:
        What happens block by block, and what stays until the last node of the stage has gone: an operation with a
        weight gives up what it saved, all others are still held by those above them.
    """
    sizes, gradients = {"x": x_size, **sizes_of(ops)}, gradients_of(ops, x_size)
    left, held = Counter(name for op in ops for name in op.saves), held_gradients(ops)
    events = []
    for op in ops:
        if not op.weight:
            continue
        unasked = [_gradient(name, gradients[name]) for name in op.inputs if op.custom]
        if op.custom:
            events += [*_at_work(op, 1, 1), *unasked]
        for name, size in ((f"gradient of {op.name}", op.weight), (f"gradient of {op.name}.bias", op.bias)):
            if size:
                events += [Event(name, 0, size, gradient_term), *[Event(name, 0, -size, gradient_term)] * adds]
        if op.custom:
            events += [*_at_work(op, 1, -1), *(event._replace(size=-event.size) for event in unasked)]
        at = held[op.output[0]]
        events.append(Event(f"d {op.name}", 0, -op.held, "backward") if op.held else _gradient(at, -gradients[at]))
        left.subtract(op.saves)
        events += [Event(name, 0, -sizes[name], "activations") for name in op.saves if not left[name]]
    return events, [Event(name, 0, -sizes[name], "activations") for name in left if left[name]]
