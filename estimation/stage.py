"""One pipeline stage (or the whole model): its forward and its backward of a micro-batch as segments of allocations."""

from collections.abc import Callable, Iterator
from functools import cached_property

from estimation.groups import Group, groups_of
from estimation.job import Job
from estimation.loss import (
    linear_backward,
    linear_forward,
    linear_inputs_backward,
    linear_weights_backward,
    loss_backward,
    loss_forward,
)
from estimation.program import Op, block_program, head_program, last_norm_program
from estimation.tape import Event, Mode, Segment, backward, forward, inputs_backward, kept, weights_backward
from estimation.types import ALL_GATHER, BACKWARD, COMMUNICATION, FORWARD, LOSS, REDUCE_SCATTER

WEIGHTS, GATHERED, FLAT_GRADIENTS = "gathered weights", "all-gather buffer", "reduce-scatter buffer"


class StageMemory:
    """Builds segments; those that are equal are built once."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.shape = job, job.shape
        self.is_first, self.is_last = number == 0, number == len(job.stages) - 1
        self.layers = job.stages[number]
        together = job.profile.groups == "together"
        self.groups = groups_of(
            job.model, job.tp, layers=len(self.layers), first=self.is_first, last=self.is_last, together=together
        )
        self._segments: dict[tuple[object, ...], Segment] = {}

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
            yield Segment.of([_event("dx", hidden, BACKWARD), _event("receive buffers", -hidden, COMMUNICATION)])
        for name, _ in self._units()[::-1]:
            events = inputs_backward(self._head if name == "head" else self._block, hidden)
            yield Segment.of([self._head_result(event) for event in events] if name == "head" else events, name)
        yield Segment.of([_event("dx", -hidden, BACKWARD)], "end")

    def weights_backward(self, *, adds: bool) -> Segment:
        """The other half. No hook of FSDP2 runs: gradients stay as they are, or are added (`adds`)."""
        if ("weights", adds) not in self._segments:
            self._segments["weights", adds] = Segment.join(self._weights_backward(adds), "backward")
        return self._segments["weights", adds]

    def _weights_backward(self, adds: bool) -> Iterator[Segment]:
        shape, rest = self.shape, []
        for name, _ in self._units():
            ops = self._head if name == "head" else self._block
            events, left = weights_backward(ops, shape.hidden, self._gradient_term, adds=adds)
            rest += left
            yield Segment.of([self._head_result(event) for event in events] if name == "head" else events, name)
        if self.is_last:
            yield Segment.of(linear_weights_backward(self._loss_backward(), adds), "loss")
        end = [*rest, Event("rope tables", 0, -shape.tokens * shape.model.head_dim * 4, "activations")]
        end += [*self._free_mask(), *self._return_input()]
        if not self.is_last:
            end += [_event("x", -shape.hidden, "activations"), _event("receive buffers", shape.hidden, COMMUNICATION)]
        yield Segment.of(end, "end")

    def unshard(self) -> Segment:
        """torch's looped schedules ask for all weights of a stage together, ahead of its first action."""
        return self._all_groups("unshard", lambda name: self._all_gather(self.groups[name][0]) * (self.job.fsdp > 1))

    def wait(self) -> Segment:
        """They are copied out group by group when that action comes."""
        return self._all_groups("wait", lambda name: self._gather(name, None, is_here=True, is_forward=False))

    def release(self, *, whole: bool) -> Segment:
        """A stage that is not among the next to run gives its weights back; `whole`: the blocks' are there too."""
        return self._all_groups(
            f"release {whole}", lambda name: self._reshard(name) if whole or self._keeps(name) else []
        )

    def _all_groups(self, label: str, events_of: Callable[[str], list[Event]]) -> Segment:
        if (label,) not in self._segments:
            is_wrapped = self.job.wrapped
            parts = [Segment.of(events_of(name) if is_wrapped else [], name) for name in self.groups]
            copies = [count for _, count in self.groups.values()]
            joined = [part for part, count in zip(parts, copies, strict=True) for _ in range(count)]
            self._segments[label,] = Segment.join(joined, label)
        return self._segments[label,]

    def accumulation(self, *, first: bool) -> Segment:
        """Whole gradients that were left by a backward for weights alone are added up."""
        events: list[Event] = []
        for group, copies in self.groups.values():
            for _ in range(copies if self.job.wrapped else 0):
                events += [*(self._accumulated(group, 1) if first else []), *self._whole_gradients(group)]
        return Segment.of(events, "accumulation")

    def _keeps(self, group: str, layer: int | None = None) -> bool:
        """Whether a group stays gathered between a forward and its backward."""
        profile = self.job.profile
        is_last_block = group == "block" and layer == self.layers[-1] and profile.last_block_stays
        return not self.job.reshard or group == "root" or (group == "head" and profile.head_stays) or is_last_block

    # Forward

    def _forward(self, gathers_all: bool, first: bool) -> list[Segment]:
        parts, shape = [], self.shape
        table = shape.tokens * shape.model.head_dim // 2 * 4  # fp32 (B, S, 1, H / 2)
        start = [Event("rope tables", 0, 2 * table, "activations"), Event("angles", 0, table, FORWARD)]
        if shape.cp > 1:
            start.append(Event("document mask", 0, shape.mask, "activations"))
        if self._input_moves:
            start += [_event("x", shape.hidden, "activations"), _event("receive buffers", -shape.hidden, COMMUNICATION)]
        previous: Group | None = None
        if "root" in self.groups and first:
            start += self._gather("root", previous)
            previous = self.groups["root"][0]
        parts.append(Segment.of(start, "start"))
        for name, layer in self._units():
            is_group = name in self.groups
            gathers = first if self._keeps(name, layer) else gathers_all
            place = (previous and previous.name, layer == self.layers[0])
            key = ("forward", name, self._mode(layer), gathers, place, self._keeps(name, layer))
            if key not in self._segments:
                events = self._gather(name, previous) if is_group and gathers else []
                events += self._unit_forward(name, layer)
                events += self._reshard(name) if is_group and not self._keeps(name, layer) else []
                self._segments[key] = Segment.of(events, name)
            parts.append(self._segments[key])
            if is_group and gathers:
                previous = self.groups[name][0]
        gone = [] if self._mask_stays else [Event("document mask", 0, -shape.mask * (shape.cp > 1), "activations")]
        end = Segment.of([Event("angles", 0, -table, FORWARD), *gone, *self._free_gathered(previous)], "end")
        if not self.is_last:
            return [*parts, end]
        if shape.profile.is_linear:  # inside the decoder's forward
            return [*parts, Segment.of(linear_forward(shape), "loss"), end]
        return [*parts, end, Segment.of(loss_forward(shape, self.job.pp > 1), "loss")]

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

    def _units(self) -> list[tuple[str, int | None]]:
        blocks: list[tuple[str, int | None]] = [("block", layer) for layer in self.layers]
        return [*([("embedding", None)] if self.is_first else []), *blocks, *([("head", None)] if self.is_last else [])]

    def _mode(self, layer: int | None) -> Mode:
        return "none" if layer is None else self.job.mode_of(layer)

    @cached_property
    def _block(self) -> list[Op]:
        return block_program(self.shape)

    @cached_property
    def _head(self) -> list[Op]:
        return last_norm_program(self.shape) if self.shape.profile.is_linear else head_program(self.shape)

    @cached_property
    def _input_moves(self) -> bool:
        """The first block keeps the stage's input: it is an activation until it is freed, then a buffer again."""
        return not self.is_first and "x" in kept(self._block, self._mode(self.layers[0]))

    def _return_input(self) -> list[Event]:
        return [_event("receive buffers", self.shape.hidden, COMMUNICATION)] if self._input_moves else []

    def _unit_forward(self, name: str, layer: int | None) -> list[Event]:
        shape = self.shape
        if name == "embedding":
            partial = shape.wide if self.job.tp > 1 else 0  # each rank looks up its rows; the sum is scattered
            events = [_event("partial embedding", partial, FORWARD)] if partial else []
            events.append(_event("x", shape.hidden, "activations"))
            return events + ([_event("partial embedding", -partial, FORWARD)] if partial else [])
        ops = self._block if name == "block" else self._head
        mode = self._mode(layer)
        events = forward(ops, shape.hidden, kept(ops, mode), "activations")
        if layer == self.layers[0] and not self.is_first and not self._input_moves:  # its buffer stays
            events = [event for event in events if not (event.name == "x" and event.offset == 0 and event.size < 0)]
        return [self._head_result(event) for event in events] if name == "head" else events

    # Backward

    def _backward(self, first: bool, fresh: bool, reduces: bool, gathers: bool) -> list[Segment]:
        job, shape, parts = self.job, self.shape, []
        if self.is_last:
            parts.append(Segment.of(self._loss_backward(), "loss"))
        else:
            parts.append(
                Segment.of(
                    [_event("dx", shape.hidden, BACKWARD), _event("receive buffers", -shape.hidden, COMMUNICATION)]
                )
            )
        units = self._units()[::-1]
        gathers = gathers and job.wrapped
        sharded = [gathers and name in self.groups and not self._keeps(name, layer) for name, layer in units]
        pending: Group | None = None
        for index, (name, layer) in enumerate(units):
            is_group, before = name in self.groups, pending
            ahead = units[index + 1][0] if index + 1 < len(units) and sharded[index + 1] else None
            place = (index > 0, sharded[index], ahead, before and before.name)
            key = ("backward", name, self._mode(layer), first, fresh, reduces, place)
            finish: list[Event] = []
            if is_group:
                finish, pending = self._finish(name, first, fresh, reduces, before)
            if key not in self._segments:
                # All but the first unit find their weights on the way: the unit before has asked for them.
                events = self._gather(name, None, is_here=index > 0, is_forward=False) if sharded[index] else []
                events += self._all_gather(self.groups[ahead][0]) if ahead and job.fsdp > 1 else []
                self._segments[key] = Segment.of([*events, *self._unit_backward(name, layer), *finish], name)
            parts.append(self._segments[key])
        end = [Event("rope tables", 0, -shape.tokens * shape.model.head_dim * 4, "activations"), *self._free_mask()]
        if "root" in self.groups:
            finish, pending = self._finish("root", first, fresh, reduces, pending)
            end = finish + end
        end += self._free_flat(pending)
        if not self.is_first:
            end += [_event("dx", -shape.hidden, BACKWARD), *self._return_input()]
        if not self.is_last:
            end += [_event("x", -shape.hidden, "activations"), _event("receive buffers", shape.hidden, COMMUNICATION)]
        elif job.pp > 1 and not shape.profile.is_linear:
            end.append(_event("logits", -shape.logits, LOSS))
        parts.append(Segment.of(end, "end"))
        return parts

    @property
    def _gradient_term(self) -> str:
        return REDUCE_SCATTER if self.job.wrapped else "gradients"

    def _unit_backward(self, name: str, layer: int | None) -> list[Event]:
        shape = self.shape
        term = self._gradient_term
        if name == "embedding":
            whole = shape.wide if self.job.tp > 1 else 0
            table = -(-shape.model.vocab_size // self.job.tp) * shape.model.dim * self.job.number
            events = [_event("gathered gradient", whole, COMMUNICATION)] if whole else []
            # DTensor makes the gradient of the whole vocabulary on every rank, then copies the rank's rows.
            everywhere = shape.model.vocab_size * shape.model.dim * self.job.number if self.job.tp > 1 else 0
            events += [_event("gradient of the whole table", everywhere, term)] if everywhere else []
            if not shape.model.tie_embeddings or not self.is_last:
                events.append(_event("gradient of tok_embeddings", table, term))
            else:  # the head has made one already: the sum is written into it
                events += [_event("second gradient", size, term) for size in (table, -table)]
            if whole:
                events += [
                    _event("gradient of the whole table", -everywhere, term),
                    _event("gathered gradient", -whole, COMMUNICATION),
                ]
            return [*events, _event("dx", -shape.hidden, BACKWARD)]
        ops = self._block if name == "block" else self._head
        mode = self._mode(layer)
        events = backward(ops, shape.hidden, mode, early_stop=self.job.profile.early_stop, gradient_term=term)
        if name == "block":
            return events
        names = {"gradient of out": f"gradient of {self._head_table}"}
        return [self._head_result(event._replace(name=names.get(event.name, event.name))) for event in events]

    def _head_result(self, event: Event) -> Event:
        """The last unit's result is what the loss is made of."""
        if event.offset != 1:
            return event
        name = "normed" if self.shape.profile.is_linear else "logits"
        return event._replace(name=name if event.name == "x" else f"d {name}", offset=0, term=LOSS)

    # FSDP2

    def _gather(
        self, name: str, previous: Group | None, *, is_here: bool = False, is_forward: bool = True
    ) -> list[Event]:
        """All-gather and copy-out; in the forward the buffer of the group before is held until here."""
        job, group = self.job, self.groups[name][0]
        if not job.wrapped:
            return []
        size = group.padded(job.fsdp) * job.number
        events: list[Event] = []
        if job.fsdp > 1 and not is_here:
            events += self._all_gather(group)
        if is_forward:
            events += self._free_gathered(previous)
        events.append(_event(f"{name} {WEIGHTS}", size, ALL_GATHER))
        if job.fsdp > 1 and not is_forward:
            events.append(_event(f"{name} {GATHERED}", -size, ALL_GATHER, "gather"))
        return events

    def _all_gather(self, group: Group) -> list[Event]:
        size = group.padded(self.job.fsdp) * self.job.number
        cast = size // self.job.fsdp if self.job.number < 4 and self.job.profile.weights == "fp32" else 0
        name = f"{group.name} cast shard"
        return [
            _event(name, cast, ALL_GATHER, "gather"),
            _event(f"{group.name} {GATHERED}", size, ALL_GATHER, "gather"),
            _event(name, -cast, ALL_GATHER, "gather"),
        ]

    def _free_gathered(self, group: Group | None) -> list[Event]:
        if group is None or self.job.fsdp == 1 or not self.job.wrapped:
            return []
        return [
            _event(f"{group.name} {GATHERED}", -group.padded(self.job.fsdp) * self.job.number, ALL_GATHER, "gather")
        ]

    def _reshard(self, name: str) -> list[Event]:
        if not self.job.wrapped:
            return []
        size = self.groups[name][0].padded(self.job.fsdp) * self.job.number
        return [_event(f"{name} {WEIGHTS}", -size, ALL_GATHER)]

    def _finish(
        self, name: str, first: bool, fresh: bool, reduces: bool, pending: Group | None
    ) -> tuple[list[Event], Group | None]:
        """What becomes of a group's gradients after its backward; also the group whose flat buffer is in flight."""
        job, group = self.job, self.groups[name][0]
        made = self._whole_gradients(group)
        sums = self._accumulated(group, 1)
        if not job.wrapped:
            return ([] if first and fresh else made), None
        if job.pp > 1:
            return ([*sums, *made] if first else made), None
        if not reduces:
            return [*self._reshard(name), *(sums if fresh else []), *made], None
        has_sum = job.reduces_once and not fresh
        freed = [*made, *self._accumulated(group, -1)] if has_sum else made
        return [*self._reshard(name), *self._reduce(group, freed, pending, fresh or job.reduces_once)], group

    def _reduce(self, group: Group, freed: list[Event], pending: Group | None, fresh: bool) -> list[Event]:
        size = group.padded(self.job.fsdp) * self.job.reduce_number
        numbers = group.padded(self.job.fsdp) // self.job.fsdp
        part = _event("gradients", numbers * 4, "gradients", "reduce")
        narrow = numbers * self.job.reduce_number if self.job.reduce_number < 4 else 0  # cast after the reduction
        reduced = [_event("reduced part", narrow, REDUCE_SCATTER, "reduce")] if narrow else []
        made = [*reduced, part, *(event._replace(size=-event.size) for event in reduced)]
        events = [*self._free_flat(pending), _event(f"{group.name} {FLAT_GRADIENTS}", size, REDUCE_SCATTER)]
        if self.job.fsdp > 1:  # torch's loop variable holds the last parameter's gradient until the function returns
            events += [*freed[:-1], *made, *freed[-1:]]
        else:  # copied, not reduced, by way of a quotient by the divide factor
            copy = _event("divided copy", size, REDUCE_SCATTER, "reduce")
            undone = copy._replace(size=-size)
            events += [*freed, copy, undone, *made] if narrow else [*freed, copy, *made, undone]
        return events if fresh else [*events, _event("gradients", -part.size, "gradients", "reduce")]

    def _accumulated(self, group: Group, sign: int) -> list[Event]:
        """Sums of whole gradients over micro-batches, in the dtype of the reduction."""
        number = sign * self.job.reduce_number
        return [_event(f"sum of {t.name}", number * t.rows_of(0) * t.columns, REDUCE_SCATTER) for t in group.tables]

    def _free_flat(self, group: Group | None) -> list[Event]:
        if group is None:
            return []
        return [
            _event(
                f"{group.name} {FLAT_GRADIENTS}", -group.padded(self.job.fsdp) * self.job.reduce_number, REDUCE_SCATTER
            )
        ]

    def _whole_gradients(self, group: Group) -> list[Event]:
        number = -self.job.number
        return [
            _event(f"gradient of {t.name}", number * t.rows_of(0) * t.columns, self._gradient_term)
            for t in group.tables
        ]

    def reduction(self, *, fresh: bool) -> Segment:
        """Pipelining reduces all gradients of a stage after its last backward."""
        if ("reduction", fresh) not in self._segments:
            self._segments["reduction", fresh] = self._reduction(fresh)
        return self._segments["reduction", fresh]

    def _reduction(self, fresh: bool) -> Segment:
        events: list[Event] = []
        pending: Group | None = None
        if not self.job.wrapped:
            return Segment.of(events)
        for name, (group, copies) in self.groups.items():
            for _ in range(copies):
                freed = self._accumulated(group, -1)
                events += [*self._reshard(name), *self._reduce(group, freed, pending, fresh)]
                pending = group
        return Segment.of([*events, *self._free_flat(pending)], "reduction")


def _event(name: str, size: int, term: str, pool: str = "main") -> Event:
    return Event(name, 0, size, term, pool)
