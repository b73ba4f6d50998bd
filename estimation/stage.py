"""One pipeline stage (or the whole model): its forward and its backward of a micro-batch as segments of allocations."""

from functools import cached_property

from estimation.groups import Group, groups_of
from estimation.job import Job
from estimation.loss import loss_backward, loss_forward
from estimation.program import Op, block_program, head_program
from estimation.tape import Event, Mode, Segment, backward, forward, kept
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

    def backward(
        self, *, first: bool, fresh: bool, reduces: bool, deferred: bool = False, gathers: bool = True
    ) -> Segment:
        """One micro-batch, recomputation and reduction of gradients included.

        Args:
            first: no gradients are there yet from earlier micro-batches of a run of the schedule.
            fresh: nor from earlier runs of this step.
            reduces: gradients are reduced with this micro-batch; under pipelining see `reduction`.
            gathers: weights that the forward has freed are gathered again.
            deferred: the gradients of weights stay as they are: no hook of FSDP2 runs in a backward for weights alone.
        """
        key = ("backward", first, fresh, reduces, deferred, gathers)
        if key not in self._segments:
            self._segments[key] = Segment.join(self._backward(first, fresh, reduces, deferred, gathers), "backward")
        return self._segments[key]

    def inputs_backward(self) -> Segment:
        """A backward for inputs alone: the loss's, and the highest point of the rest, which leaves all as it was.

        In truth it frees what only cheap operations need and keeps the gradients that the weights' half needs.
        """
        rest = self.backward(first=True, fresh=True, reduces=False, deferred=True, gathers=False)
        undone = [Event(name, 0, -size, term) for (term, name), size in rest.total().items() if size]
        loss = Segment.of(loss_backward(self.shape, True) if self.is_last else [], "loss")
        return Segment.join([loss, rest, Segment.of(sorted(undone, key=lambda event: event.size))], "backward")

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
        if not self.is_first:
            start += [_event("x", shape.hidden, "activations"), _event("receive buffers", -shape.hidden, COMMUNICATION)]
        previous: Group | None = None
        if "root" in self.groups and first:
            start += self._gather("root", previous)
            previous = self.groups["root"][0]
        parts.append(Segment.of(start, "start"))
        for name, layer in self._units():
            is_group = name in self.groups
            gathers = first if self._keeps(name, layer) else gathers_all
            key = ("forward", name, self._mode(layer), gathers, previous and previous.name, self._keeps(name, layer))
            if key not in self._segments:
                events = self._gather(name, previous) if is_group and gathers else []
                events += self._unit_forward(name, layer)
                events += self._reshard(name) if is_group and not self._keeps(name, layer) else []
                self._segments[key] = Segment.of(events, name)
            parts.append(self._segments[key])
            if is_group and gathers:
                previous = self.groups[name][0]
        end = [Event("angles", 0, -table, FORWARD)]
        end += self._free_gathered(previous)
        parts.append(Segment.of(end, "end"))
        if self.is_last:
            parts.append(Segment.of(loss_forward(shape, self.job.pp > 1), "loss"))
        return parts

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
        return head_program(self.shape)

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
        return [_logits(event) for event in events] if name == "head" else events

    # Backward

    def _backward(self, first: bool, fresh: bool, reduces: bool, deferred: bool, gathers: bool) -> list[Segment]:
        job, shape, parts = self.job, self.shape, []
        if self.is_last and not deferred:  # the half for inputs has done it
            parts.append(Segment.of(loss_backward(shape, job.pp > 1), "loss"))
        elif not self.is_last:
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
            key = ("backward", name, self._mode(layer), first, fresh, reduces, deferred, place)
            finish: list[Event] = []
            if is_group and not (deferred and first and job.wrapped):
                finish, pending = self._finish(name, first, fresh, reduces, before)
            if key not in self._segments:
                # All but the first unit find their weights on the way: the unit before has asked for them.
                events = self._gather(name, None, is_here=index > 0, is_forward=False) if sharded[index] else []
                events += self._all_gather(self.groups[ahead][0]) if ahead and job.fsdp > 1 else []
                self._segments[key] = Segment.of([*events, *self._unit_backward(name, layer), *finish], name)
            parts.append(self._segments[key])
        end = [Event("rope tables", 0, -shape.tokens * shape.model.head_dim * 4, "activations")]
        if "root" in self.groups and not (deferred and first and job.wrapped):
            finish, pending = self._finish("root", first, fresh, reduces, pending)
            end = finish + end
        end += self._free_flat(pending)
        if not self.is_first:
            end += [_event("dx", -shape.hidden, BACKWARD), _event("receive buffers", shape.hidden, COMMUNICATION)]
        if not self.is_last:
            end += [_event("x", -shape.hidden, "activations"), _event("receive buffers", shape.hidden, COMMUNICATION)]
        elif job.pp > 1:
            end.append(_event("logits", -self._all_logits, LOSS))
        parts.append(Segment.of(end, "end"))
        return parts

    @property
    def _all_logits(self) -> int:
        return self.shape.logits

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
        tied = "output" not in {table.name for group, _ in self.groups.values() for table in group.tables}
        names = {"gradient of out": f"gradient of {'tok_embeddings' if tied else 'output'}"}
        return [_logits(event._replace(name=names.get(event.name, event.name))) for event in events]

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
            events += [*freed, copy, copy._replace(size=-size), *made]
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


def _logits(event: Event) -> Event:
    """The head's output is the logits."""
    if event.offset != 1:
        return event
    return event._replace(name="logits" if event.name == "x" else "d logits", offset=0, term=LOSS)
