"""One pipeline stage (or the whole model): its forward and its backward of a micro-batch as segments of allocations."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from estimation.compiled_block import CompiledBlock, compiled_backward, compiled_forward
from estimation.compiled_float8 import Float8Block, SentBlock
from estimation.float8 import Float8, cast_products
from estimation.groups import Group
from estimation.job import Job
from estimation.loss import (
    linear_backward,
    linear_forward,
    linear_inputs_backward,
    linear_weights_backward,
    loss_backward,
    loss_forward,
)
from estimation.program import Op, Shape, block_program, head_program, kept_results, last_norm_program
from estimation.tape import Event, Mode, Segment, backward, forward, inputs_backward, kept, weights_backward
from estimation.types import BACKWARD, COMMUNICATION, FORWARD, LOSS
from estimation.wrapped import GroupMemory, event_of

_TIED = "gradient of the tied table"  # waits for both its parts


@dataclass
class Blocks:
    """What all stages of a job share: segments of blocks, and the events and operations that they follow from."""

    segments: dict[tuple[object, ...], Segment] = field(default_factory=dict)
    events: dict[tuple[object, ...], list[Event]] = field(default_factory=dict)
    programs: dict[object, list[Op]] = field(default_factory=dict)
    compiled: dict[object, CompiledBlock] = field(default_factory=dict)


def block_ops(shape: Shape, casts: Float8 | None, names: frozenset[str]) -> list[Op]:
    """The operations of a block with the products `names` in float8."""
    if casts is None or not names:
        return block_program(shape)
    return block_program(shape, names, lambda ops: cast_products(ops, shape, casts, names))


def written_block(shape: Shape, casts: Float8 | None, names: frozenset[str], *, is_op: bool) -> CompiledBlock:
    """The same block as inductor writes it; `is_op`: with recompute per operation."""
    keep = kept_results(shape, names) if is_op else set[str]()
    if casts is None or not names:
        return CompiledBlock(shape, keep)
    kind = SentBlock if shape.tp > 1 and casts.recipe == "tensorwise" else Float8Block
    return kind(shape, keep, casts, names)


class StageMemory(GroupMemory):
    """Builds segments; those that are equal are built once."""

    def __init__(self, job: Job, number: int, blocks: Blocks) -> None:
        super().__init__(job, number)
        self._blocks, self._events = blocks.segments, blocks.events
        self._programs, self._compiled = blocks.programs, blocks.compiled

    @property
    def receive_buffers(self) -> int:
        """Pipelining keeps one buffer per micro-batch for each boundary that it receives from."""
        if self.job.pp == 1:
            return 0
        boundaries = (not self.is_first) + (not self.is_last)
        return boundaries * self.shape.hidden * (self.job.batch_rows // self.job.rows)

    def forward(self, *, gathers: bool, first: bool = True) -> Segment:
        """One micro-batch; `gathers`: weights are not there from before, `first`: nor are those that always stay."""
        key = ("forward", gathers, first)
        if key not in self._segments:
            self._segments[key] = Segment.join(self._forward(gathers, first), "forward")
        return self._segments[key]

    def backward(self, *, first: bool, fresh: bool, reduces: bool, gathers: bool = True) -> Segment:
        """One micro-batch, recomputation and reduction of gradients included.

        Args:
            first: no gradients are there yet from earlier micro-batches of a run of the schedule.
            fresh: nor from earlier runs of this step.
            reduces: gradients are reduced with this micro-batch; under pipelining see `reduction`.
            gathers: weights that the forward has freed are gathered again.
        """
        key = ("backward", first, fresh, reduces, gathers)
        if key not in self._segments:
            self._segments[key] = Segment.join(self._backward(first, fresh, reduces, gathers), "backward")
        return self._segments[key]

    def inputs_backward(self) -> Segment:
        """A backward for the gradient of the stage's input alone; what the weights' half needs stays."""
        if ("inputs",) not in self._segments:
            self._segments["inputs",] = Segment.join(self._inputs_backward(), "backward")
        return self._segments["inputs",]

    def _inputs_backward(self) -> Iterator[Segment]:
        hidden = self.shape.hidden
        if self.is_last:
            yield Segment.of(linear_inputs_backward(self._loss_backward()), "loss")
        else:
            yield Segment.of([event_of("dx", hidden, BACKWARD), event_of("receive buffers", -hidden, COMMUNICATION)])
        for name, layer in self._units[::-1]:
            events = inputs_backward(self._ops(layer), hidden)
            yield Segment.of([self._head_result(event) for event in events] if name == "head" else events, name)
        yield Segment.of([event_of("dx", -hidden, BACKWARD)], "end")

    def weights_backward(self, *, adds: bool, first: bool) -> Segment:
        """The other half. Gradients stay as they are, or are added to those that are there (`adds`), unless hooks of
        FSDP2 run; `first`: those find no sums yet."""
        key = ("weights", adds, first)
        if key not in self._segments:
            self._segments[key] = Segment.join(self._weights_backward(adds, first), "backward")
        return self._segments[key]

    def _weights_backward(self, adds: bool, first: bool) -> Iterator[Segment]:
        shape, rest = self.shape, []
        for name, layer in self._units:
            is_added = adds and not (self.adds_early and layer is not None)
            events, left = weights_backward(self._ops(layer), shape.hidden, self._gradient_term, adds=is_added)
            rest += left
            yield Segment.of([self._head_result(event) for event in events] if name == "head" else events, name)
        if self.is_last:
            yield Segment.of(linear_weights_backward(self._loss_backward(), adds), "loss")
        if self.adds_early:
            yield self.accumulation(first=first, early=True)
        end = [*rest, Event("rope tables", 0, -shape.tokens * shape.model.head_dim * 4, "activations")]
        end += [*self._free_mask(), *self._return_input()]
        if not self.is_last:
            end += [
                event_of("x", -shape.hidden, "activations"),
                event_of("receive buffers", shape.hidden, COMMUNICATION),
            ]
        yield Segment.of(end, "end")

    # Forward

    def _forward(self, gathers_all: bool, first: bool) -> list[Segment]:
        parts, shape = [], self.shape
        table = shape.tokens * shape.model.head_dim // 2 * 4  # fp32 (B, S, 1, H / 2)
        start = [Event("rope tables", 0, 2 * table, "activations"), Event("angles", 0, table, FORWARD)]
        if shape.cp > 1:
            start.append(Event("document mask", 0, shape.mask, "activations"))
        if self._input_moves:
            start += [
                event_of("x", shape.hidden, "activations"),
                event_of("receive buffers", -shape.hidden, COMMUNICATION),
            ]
        previous: Group | None = None
        if "root" in self.groups and first:
            start += self._gather("root", previous)
            previous = self.groups["root"][0]
        parts.append(Segment.of(start, "start"))
        for name, layer in self._units:
            is_group = name in self.groups
            keeps = self._keeps(name, layer)
            gathers = first if keeps else gathers_all
            is_input = layer == self.layers[0] and not self.is_first and not self._input_moves
            root = (self.is_first, self.is_last) if previous and previous.name == "root" else None  # of this stage
            place = (previous and previous.name, is_input, root)
            key = ("forward", name, self._kind(layer), gathers, place, keeps)
            known = self._segments if layer is None else self._blocks
            if key not in known:
                events = self._gather(name, previous) if is_group and gathers else []
                events += self._unit_forward(name, layer, is_input=is_input)
                events += self._reshard(name) if is_group and not keeps else []
                known[key] = Segment.of(events, name)
            parts.append(known[key])
            parts += self._offload(layer, -1)
            if is_group and gathers:
                previous = self.groups[name][0]
        gone = [] if self._mask_stays else [Event("document mask", 0, -shape.mask * (shape.cp > 1), "activations")]
        end = Segment.of([Event("angles", 0, -table, FORWARD), *gone, *self._free_gathered(previous)], "end")
        if not self.is_last:
            return [*parts, end]
        if shape.profile.is_linear:  # inside the decoder's forward
            return [*parts, Segment.of(linear_forward(shape), "loss"), end]
        return [*parts, end, Segment.of(loss_forward(shape, self.job.pp > 1), "loss")]

    def _offload(self, layer: int | None, sign: int) -> list[Segment]:
        """Once a block has run, the oldest input of a block that is still here goes to the host; it comes back."""
        stash = self.shape.profile.stash
        if stash is None or layer is None:
            return []
        if (self.layers.index(layer) if sign < 0 else len(self.layers) - 1 - layer) < stash:
            return []
        return [Segment.of([event_of("x", sign * self.shape.hidden, "activations")], "offloading")]

    @property
    def _mask_stays(self) -> bool:
        """A recomputed block holds the mask that all blocks are given."""
        return any(self._mode(layer) != "none" for layer in self.layers)

    def _free_mask(self) -> list[Event]:
        is_there = self.shape.cp > 1 and self._mask_stays
        return [Event("document mask", 0, -self.shape.mask, "activations")] if is_there else []

    def _loss_backward(self) -> list[Event]:
        if self.shape.profile.is_linear:
            return linear_backward(self.shape, self._head_table, self._gradient_term)
        return loss_backward(self.shape, self.job.pp > 1)

    @property
    def _head_table(self) -> str:
        """The name of the head's parameter: of the embedding where they share one."""
        is_own = "output" in {table.name for group, _ in self.groups.values() for table in group.tables}
        return "output" if is_own else "tok_embeddings"

    @cached_property
    def _units(self) -> list[tuple[str, int | None]]:
        names = self._names
        blocks: list[tuple[str, int | None]] = [(names[self._weights_of(layer)], layer) for layer in self.layers]
        return [*([("embedding", None)] if self.is_first else []), *blocks, *([("head", None)] if self.is_last else [])]

    def _mode(self, layer: int | None) -> Mode:
        return "none" if layer is None else self.job.mode_of(layer)

    def _kind(self, layer: int | None) -> tuple[Mode, frozenset[str]]:
        """Layers of a kind have the same segments."""
        return self._mode(layer), frozenset() if layer is None else self.job.products_of(layer)

    def _ops(self, layer: int | None) -> list[Op]:
        """Of a block, or of what ends in the head."""
        key = "head" if layer is None else self.job.products_of(layer)
        if key not in self._programs:
            program = (
                self._head() if layer is None else block_ops(self.shape, self.job.float8, self.job.products_of(layer))
            )
            self._programs[key] = program
        return self._programs[key]

    def _head(self) -> list[Op]:
        return last_norm_program(self.shape) if self.shape.profile.is_linear else head_program(self.shape)

    def _pass(self, direction: Literal["forward", "backward"], layer: int | None) -> list[Event]:
        """A pass through a block, or through what ends in the head."""
        key = (direction, "head" if layer is None else self._kind(layer))
        if key not in self._events:
            self._events[key] = self._run(direction, layer)
        return self._events[key]

    def _run(self, direction: Literal["forward", "backward"], layer: int | None) -> list[Event]:
        mode, hidden, term = self._mode(layer), self.shape.hidden, self._gradient_term
        is_forward = direction == "forward"
        if layer is not None and self.shape.compiled:
            block = self._written(layer)
            # In float8 with tensor parallelism it is counted as around the program: compiled_float8.py knows no other.
            is_inside = self.shape.profile.compiles_recompute and not (self.job.float8 and self.shape.tp > 1)
            mode = "op" if mode == "full" and is_inside else mode  # which keeps nothing then
            return compiled_forward(block, mode) if is_forward else compiled_backward(block, mode, term)
        ops, early_stop = self._ops(layer), self.job.profile.early_stop
        if is_forward:
            return forward(ops, hidden, kept(ops, mode))
        return backward(ops, hidden, mode, early_stop=early_stop, gradient_term=term)

    def _written(self, layer: int) -> CompiledBlock:
        """A block as inductor writes it."""
        names, is_op = self.job.products_of(layer), self._mode(layer) == "op"
        key = (names, is_op)
        if key not in self._compiled:
            self._compiled[key] = written_block(self.shape, self.job.float8, names, is_op=is_op)
        return self._compiled[key]

    @cached_property
    def _input_moves(self) -> bool:
        """The first block keeps the stage's input: it is an activation until it is freed, then a buffer again."""
        if self.is_first or self.shape.compiled:
            return not self.is_first
        return "x" in kept(self._ops(self.layers[0]), self._mode(self.layers[0]))

    def _return_input(self) -> list[Event]:
        return [event_of("receive buffers", self.shape.hidden, COMMUNICATION)] if self._input_moves else []

    def _unit_forward(self, name: str, layer: int | None, *, is_input: bool) -> list[Event]:
        shape = self.shape
        if name == "embedding":
            partial = shape.wide if self.job.tp > 1 else 0  # each rank looks up its rows; the sum is scattered
            events = [event_of("partial embedding", partial, FORWARD)] if partial else []
            events.append(event_of("x", shape.hidden, "activations"))
            return events + ([event_of("partial embedding", -partial, FORWARD)] if partial else [])
        events = self._pass("forward", layer)
        if is_input:  # its buffer stays
            events = [event for event in events if not (event.name == "x" and event.offset == 0 and event.size < 0)]
        return [self._head_result(event) for event in events] if name == "head" else events

    # Backward

    def _backward(self, first: bool, fresh: bool, reduces: bool, gathers: bool) -> list[Segment]:
        job, shape, parts = self.job, self.shape, []
        units = self._units[::-1]
        gathers = gathers and job.wrapped
        sharded = [gathers and name in self.groups and not self._keeps(name, layer) for name, layer in units]
        # The gradient of the loss reaches the head first, if the head has made the loss: it asks for the last block.
        is_early = self.is_last and shape.profile.is_linear and sharded[1] and job.fsdp > 1
        if self.is_last:
            early = self._all_gather(self.groups[units[1][0]][0]) if is_early else []
            made = self._loss_backward()
            made = _added(made) if self._adds_at_once(first, fresh) else made
            parts.append(Segment.of([*early, *made], "loss"))
        else:
            parts.append(
                Segment.of(
                    [event_of("dx", shape.hidden, BACKWARD), event_of("receive buffers", -shape.hidden, COMMUNICATION)]
                )
            )
        pending: Group | None = None
        for index, (name, layer) in enumerate(units):
            is_group, before = name in self.groups, pending
            is_asked = index == 0 and is_early
            ahead = units[index + 1][0] if index + 1 < len(units) and sharded[index + 1] and not is_asked else None
            is_received = index == 0 and not self.is_last
            place = (index > 0, sharded[index], ahead, before and before.name, is_received)
            key = ("backward", name, self._kind(layer), first, fresh, reduces, place)
            if is_group:
                pending = self._after(name, reduces)
            known = self._segments if layer is None else self._blocks
            if key not in known:
                # All but the first unit find their weights on the way: the unit before has asked for them.
                events = self._gather(name, None, is_here=index > 0, is_forward=False) if sharded[index] else []
                events += self._all_gather(self.groups[ahead][0]) if ahead and job.fsdp > 1 else []
                made = self._unit_backward(name, layer)
                if is_received:  # its gradient lies in a buffer, which stays
                    made = [event for event in made if event[:2] != ("dx", 1)]
                if self._adds_at_once(first, fresh):
                    made = _added(made, together=layer is not None and self.shape.compiled)
                events += made
                events += self._finish(name, first, fresh, reduces, before) if is_group else []
                known[key] = Segment.of(events, name)
            parts += [*self._offload(layer, 1), known[key]]
        end = [Event("rope tables", 0, -shape.tokens * shape.model.head_dim * 4, "activations"), *self._free_mask()]
        if "root" in self.groups:
            end = self._finish("root", first, fresh, reduces, pending) + end
            pending = self._after("root", reduces)
        end += self._free_flat(pending)
        if job.wrapped and job.pp == 1 and reduces:
            end += self._free_reduced(fresh or not self._reduces_alone(first, fresh, reduces))
        if not self.is_first:
            end += [event_of("dx", -shape.hidden, BACKWARD), *self._return_input()]
        if not self.is_last:
            end += [
                event_of("x", -shape.hidden, "activations"),
                event_of("dx", -shape.hidden, BACKWARD),
                event_of("receive buffers", shape.hidden, COMMUNICATION),
            ]
        elif job.pp > 1 and not shape.profile.is_linear:
            end.append(event_of("logits", -shape.logits, LOSS))
        parts.append(Segment.of(end, "end"))
        return parts

    def _unit_backward(self, name: str, layer: int | None) -> list[Event]:
        shape = self.shape
        term = self._gradient_term
        if name == "embedding":
            return [*self._table_backward(), event_of("dx", -shape.hidden, BACKWARD)]
        events = self._pass("backward", layer)
        if layer is not None:
            return events
        profile, name = shape.profile, f"gradient of {self._head_table}"
        if profile.updates_in_backward and shape.model.tie_embeddings:
            name = _TIED
        found = [
            self._head_result(event._replace(name=name) if event.name == "gradient of out" else event)
            for event in events
        ]
        if profile.loss != "chunked compiled":
            return found
        second = [event_of("second gradient", sign * self._own_table * self.job.number, term) for sign in (1, -1)]
        at = next(index for index, event in enumerate(found) if event.name == name)
        return [*found[: at + 1], *second, *found[at + 1 :]]  # that of the next piece, before it is added

    def _table_backward(self) -> list[Event]:
        shape, term = self.shape, self._gradient_term
        own = self._own_table * self.job.number
        if shape.model.tie_embeddings and self.is_last:  # the head has made one already: the sum is written into it
            events = [event_of("second gradient", size, term) for size in (own, -own)]
            events += [event_of(_TIED, -own, term)] if shape.profile.updates_in_backward else []
        else:
            events = [event_of("gradient of tok_embeddings", own, term)]
        if self.job.tp == 1:
            return events
        gathered = event_of("gathered gradient", shape.wide, COMMUNICATION)
        if shape.profile.whole_table_gradient:
            size = shape.model.vocab_size * shape.model.dim * self.job.number
            whole = event_of("gradient of the whole table", size, term)
            return [gathered, whole, *events, whole._replace(size=-whole.size), gathered._replace(size=-shape.wide)]
        masked = event_of("masked gradient", shape.wide, BACKWARD)  # without the tokens of other ranks
        return [gathered, masked, gathered._replace(size=-shape.wide), *events, masked._replace(size=-shape.wide)]

    def _head_result(self, event: Event) -> Event:
        """The last unit's result is what the loss is made of."""
        if event.offset != 1:
            return event
        name = "normed" if self.shape.profile.is_linear else "logits"
        return event._replace(name=name if event.name == "x" else f"d {name}", offset=0, term=LOSS)


def _added(events: list[Event], *, together: bool = False) -> list[Event]:
    """New gradients go as soon as they are added to those that are there: one by one, or at the unit's end where one
    function makes them all."""
    found, added = [], list[Event]()
    for event in events:
        found.append(event)
        if event.size > 0 and event.name.startswith("gradient of ") and not event.name.endswith((" table", " states")):
            (added if together else found).append(event._replace(size=-event.size))
    return [*found, *added]
