"""From a list of operations to allocations and frees in their order: what autograd and recompute do with it.

An event is (name, offset, bytes): bytes > 0 allocates, < 0 frees; `offset` 1 means the next unit's (embedding, block,
head). A segment sums its events up, so that a step of thousands of operations costs a few additions.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
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


def taken_back(events: Iterable[Event]) -> list[Event]:
    """The same, freed."""
    return [event._replace(size=-event.size) for event in events]


POOLS = ("main", "gather", "reduce")  # the streams that allocate: compute, FSDP's all-gather, FSDP's reduce-scatter
_PLACE = {pool: place for place, pool in enumerate(POOLS, start=1)}


@dataclass(eq=False, slots=True)
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
            if total > highest:
                highest = total
            if now[index] > rise[index]:
                rise[index] = now[index]
        return Segment(events, (), (total, *now[1:]), (highest, *rise[1:]), label)

    @staticmethod
    def join(parts: Iterable["Segment"], label: str = "") -> "Segment":
        parts = tuple(parts)
        now, rise = [0, 0, 0, 0], [0, 0, 0, 0]
        for _, run in groupby(parts, id):  # the same blocks follow one another
            part, *others = run
            for index, (delta, own) in enumerate(zip(part.delta, part.rise, strict=True)):
                highest = now[index] + own + max(0, len(others) * delta)
                if highest > rise[index]:
                    rise[index] = highest
                now[index] += delta * (1 + len(others))
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


def _made_by(op: Op) -> tuple[str, ...]:
    return op.output[0], *(name for name, _ in op.extra)


def saved_by(ops: Sequence[Op]) -> set[str]:
    """The tensors that some backward reads."""
    return {name for op in ops for name in op.saves}


def kept(ops: Sequence[Op], mode: Mode) -> set[str]:
    """The tensors of a forward that wait for the backward."""
    if mode == "none":
        return saved_by(ops)
    if mode == "full":
        return {"x"}
    return {"x"} | {name for op in ops if op.keep for name in _made_by(op)}


def forward(ops: Sequence[Op], x_size: int, keep: set[str], *, made: set[str] | None = None) -> list[Event]:
    """Allocations and frees of one pass. The last output stays: it is the next unit's "x".

    Args:
        x_size: bytes of the input.
        keep: tensors that are not freed.
        made: of a recomputation, what is there already; it drops what no backward needs.
    """
    prefix, term = ("", "activations") if made is None else ("again ", "recompute")
    made, sizes = made or set(), {"x": x_size, **sizes_of(ops)}
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.inputs, *op.reads)}
    events: list[Event] = []

    def add(name: str, sign: int) -> None:
        owner, offset = ("x", 1) if name == "out" else (name if name == "x" or name in made else prefix + name, 0)
        kind = "activations" if name in made else term if name in keep or name in ("x", "out") else "forward"
        events.append(Event(owner, offset, sign * sizes[name], kind))

    for index, op in enumerate(ops):
        if op.output[0] not in made:
            events += _at_work(op, 0, 1)
            for name in _made_by(op):
                add(name, 1)
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
    if not size:
        return []
    piece = op.piece or size
    event = Event(f"{op.name} at work", 0, sign * piece, ("forward", "backward")[direction])
    rest = size % piece
    return [event] * (size // piece) + ([event._replace(size=sign * rest)] if rest else [])


def recomputation(ops: Sequence[Op], early_stop: bool) -> Sequence[Op]:
    """The operations that run again: with early stop, up to the last that makes something for the backward.

    What would be held longer is held to the end."""
    if not early_stop:
        return [op for op in ops if op.output[0] != "out"]
    needed = saved_by(ops)
    last = max(i for i, op in enumerate(ops) if op.custom or not needed.isdisjoint(_made_by(op)))
    held = dict.fromkeys(name for op in ops[last:] for name in op.reads if name not in ops[last].inputs)
    return [*ops[:last], replace(ops[last], reads=tuple(held))]


class Gradients:
    """The gradients of activations in a backward, and whose storage each lies in.

    An operation that passes its gradient on shares its storage, which goes with the last that holds it. At first there
    is that of "out".
    """

    def __init__(self, ops: Sequence[Op], x_size: int) -> None:
        self._sizes = {"x": x_size, **{op.output[0]: op.gradient or op.output[1] for op in ops}}
        self._storage = {"out": "out"}
        self._holders = Counter(["out"])

    def __contains__(self, name: str) -> bool:
        return name in self._storage

    def of_inputs(self, op: Op) -> Iterator[Event]:
        """The backward of `op` makes the gradients of its inputs, or passes on that of its output."""
        for name in op.inputs:
            if not op.passes:
                yield from self._make(name)
            elif name not in self:
                self._hold(name, self._storage[op.output[0]])

    def release(self, name: str) -> Iterator[Event]:
        """Whoever reads the gradient of `name` has run."""
        at = self._storage.pop(name)
        self._holders[at] -= 1
        if not self._holders[at]:
            yield self.event(at, -1)

    def event(self, at: str, sign: int) -> Event:
        """What lies where the gradient of `at` was made comes or goes."""
        return Event("dx" if at in ("out", "x") else f"d {at}", int(at == "out"), sign * self._sizes[at], "backward")

    def _hold(self, name: str, at: str) -> None:
        self._storage[name] = at
        self._holders[at] += 1

    def _make(self, name: str) -> Iterator[Event]:
        """A gradient, to which one that is there is added."""
        yield self.event(name, 1)
        at = self._storage.get(name)
        if at is None:
            self._hold(name, name)
        elif at != name:
            if self._holders[at] > 1:  # somebody still needs the other: the sum is a third tensor
                yield from (self.event(name, 1), self.event(name, -1))
            yield from self.release(name)
            self._hold(name, name)
        else:
            yield self.event(name, -1)


class Saved:
    """What the forward, or a recomputation, has left for the backward: a tensor goes with its last reader.

    Args:
        dropped: what the recomputation has dropped already.
    """

    def __init__(self, ops: Sequence[Op], x_size: int, mode: Mode, dropped: Collection[str] = ()) -> None:
        self._sizes = {"x": x_size, **sizes_of(ops)}
        self._readers = Counter(name for op in ops for name in op.saves)
        self._readers["x"] += mode != "none"  # the checkpoint
        stored = kept(ops, mode).difference(dropped)
        self._stored = [name for name in self._sizes if name in stored]

    def read_by(self, op: Op) -> list[Event]:
        """The backward of `op` has run."""
        self._readers.subtract(op.saves)
        return [self._free(name) for name in op.saves if not self._readers[name]]

    def rest(self) -> list[Event]:
        """What the forward has left and is still here: nobody has read it."""
        return [self._free(name) for name in [*self._stored]]

    def _free(self, name: str) -> Event:
        if name not in self._stored:
            return Event(f"again {name}", 0, -self._sizes[name], "recompute")
        self._stored.remove(name)
        return Event(name, 0, -self._sizes[name], "activations")


def backward(
    ops: Sequence[Op], x_size: int, mode: Mode, *, early_stop: bool = True, gradient_term: str = "reduce-scatter"
) -> list[Event]:
    """Allocations and frees of a unit's backward, recomputation included.

    The gradient of the output is there as ("dx", +1) and is freed; that of "x" is left as ("dx", 0).
    """
    again = [] if mode == "none" else _recompute(ops, x_size, mode, early_stop)
    dropped = {event.name for event in again if event.size < 0}
    gradients, saved = Gradients(ops, x_size), Saved(ops, x_size, mode, dropped)
    events: list[Event] = []
    for op in reversed(ops):
        if op.saves:  # the first that asks for something
            events += again
            again = []
        if op.output[0] not in gradients:  # a mask
            events += saved.read_by(op)
            continue
        events += [*_at_work(op, 1, 1), *gradients.of_inputs(op)]
        events += [*_gradients_of_weights(op, gradient_term), *_at_work(op, 1, -1)]
        events += [*gradients.release(op.output[0]), *saved.read_by(op)]
    return events + saved.rest()


def _recompute(ops: Sequence[Op], x_size: int, mode: Mode, early_stop: bool) -> list[Event]:
    """The part of the forward that is run again."""
    again = recomputation(ops, early_stop)
    return forward(again, x_size, saved_by(ops) | {"x"}, made=kept(ops, mode) - {"x"})


def _gradients_of_weights(op: Op, term: str) -> list[Event]:
    sizes = {op.name: op.weight, f"{op.name}.bias": op.bias}
    return [Event(f"gradient of {name}", 0, size, term) for name, size in sizes.items() if size]


def inputs_backward(ops: Sequence[Op], x_size: int) -> list[Event]:
    """The half of a backward that ends with the gradient of "x", without recomputation (torch: stage_backward_input).

    All that was saved stays, and so do the gradients that the weights' half starts from: those of the results of
    operations with a weight.
    """
    return _inputs_half(ops, x_size)[0]


def _inputs_half(ops: Sequence[Op], x_size: int) -> tuple[list[Event], Gradients]:
    """What happens, and the gradients that are left."""
    events: list[Event] = []
    gradients = Gradients(ops, x_size)
    for op in reversed(ops):
        if op.output[0] not in gradients:
            continue
        events += [*_at_work(op, 1, 1), *gradients.of_inputs(op)]
        if op.custom:
            events += [Event(f"gradient of {op.name}", 0, sign * op.weight, "backward") for sign in (1, -1)]
        events += _at_work(op, 1, -1)
        if op.held:
            events.append(Event(f"d {op.name}", 0, op.held, "backward"))
        if op.held or not op.weight:
            events += gradients.release(op.output[0])
    return events, gradients


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
    saved, (_, gradients) = Saved(ops, x_size, "none"), _inputs_half(ops, x_size)
    events: list[Event] = []
    for op in ops:
        if not op.weight:
            continue
        unasked = [gradients.event(name, 1) for name in op.inputs if op.custom]
        events += [*_at_work(op, 1, 1), *unasked] if op.custom else []
        for made in _gradients_of_weights(op, gradient_term):
            events += [made, *taken_back([made] * adds)]
        events += [*_at_work(op, 1, -1), *taken_back(unasked)] if op.custom else []
        events += [Event(f"d {op.name}", 0, -op.held, "backward")] if op.held else gradients.release(op.output[0])
        events += saved.read_by(op)
    return events, saved.rest()
