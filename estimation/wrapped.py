"""What FSDP2 holds of a stage's groups: gathered weights, whole gradients and their sums, their reduction.

Sizes are bytes, of the first tensor-parallel rank. Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from estimation.groups import Group, block_group, groups_of, local_rows
from estimation.job import Job
from estimation.tape import Event, Segment, taken_back
from estimation.types import ALL_GATHER, REDUCE_SCATTER

STATE = "optimizer state"
WEIGHTS, GATHERED, FLAT_GRADIENTS = "gathered weights", "all-gather buffer", "reduce-scatter buffer"


class GroupMemory:
    """Builds segments, and lists of events for parts of segments; segments that are equal are built once."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.shape = job, job.shape
        self.is_first, self.is_last = number == 0, number == len(job.stages) - 1
        self.layers = job.stages[number]
        kinds = Counter(self._weights_of(layer) for layer in self.layers)
        self._names = {kind: f"block {count}" if count > 1 else "block" for count, kind in enumerate(kinds, start=1)}
        blocks = {
            name: (replace(block_group(job.model, job.tp, kind), name=name), kinds[kind])
            for kind, name in self._names.items()
        }
        self.groups = groups_of(
            job.model, job.tp, blocks=blocks, first=self.is_first, last=self.is_last,
            together=job.profile.groups == "together",
        )  # fmt: skip
        self._segments: dict[tuple[object, ...], Segment] = {}
        self._parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}

    def _weights_of(self, layer: int) -> frozenset[str]:
        """The weights of a block that are gathered in float8."""
        is_cast = self.job.float8 is not None and self.job.float8.gathered
        return self.job.products_of(layer) if is_cast else frozenset()

    def parts(self, fsdp_rank: int, tp_rank: int) -> list[tuple[int, int, int]]:
        """(numbers as stored, padded to the longest part; numbers in truth; how often) of each parameter of a rank."""
        key, fsdp = (fsdp_rank, tp_rank), self.job.fsdp
        if key not in self._parts:
            self._parts[key] = [
                (-(-rows // fsdp) * table.columns, local_rows(rows, fsdp, fsdp_rank) * table.columns, copies)
                for group, copies in self.groups.values()
                for table in group.tables
                for rows in (table.rows_of(tp_rank),)
            ]
        return self._parts[key]

    def states(self, fsdp_rank: int, tp_rank: int) -> Segment:
        """The optimizer's tensors."""
        key = ("states", fsdp_rank, tp_rank)
        if key not in self._segments:
            segments = []
            for _, held, copies in self.parts(fsdp_rank, tp_rank):
                sizes = self.job.state_sizes(held)
                made = Segment.of(event_of(STATE, size, STATE) for size in sizes if size)
                segments += [made] * copies
            self._segments[key] = Segment.join(segments, "start")
        return self._segments[key]

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

    @property
    def adds_early(self) -> bool:
        """The half of a backward for weights begins with the loss on the last stage. FSDP2 has hooks there: all that is
        done when the head's gradient comes is added up."""
        return self.is_last and self.job.wrapped and self.job.profile.is_linear

    def accumulation(self, *, first: bool, early: bool = False) -> Segment:
        """Whole gradients that were left by a backward for weights alone are added up; `early`: with it."""

        def events_of(name: str) -> list[Event]:
            group = self.groups[name][0]
            if self.adds_early and early == (name in ("head", "root")):
                return []
            return [*self._gradients(group, -1), *(self._sums(group, 1) if first else [])]

        return self._all_groups(f"accumulation {first} {early}", events_of)

    def _keeps(self, group: str, layer: int | None = None) -> bool:
        """Whether a group stays gathered between a forward and its backward."""
        profile = self.job.profile
        is_last_block = layer is not None and layer == self.layers[-1] and profile.last_block_stays
        return not self.job.reshard or group == "root" or (group == "head" and profile.head_stays) or is_last_block

    @property
    def _gradient_term(self) -> str:
        return REDUCE_SCATTER if self.job.wrapped else "gradients"

    def _gather(
        self, name: str, previous: Group | None, *, is_here: bool = False, is_forward: bool = True
    ) -> list[Event]:
        """All-gather and copy-out; in the forward the buffer of the group before is held until here."""
        job, group = self.job, self.groups[name][0]
        if not job.wrapped:
            return []
        size = group.gathered(job.fsdp, job.number)
        events: list[Event] = []
        if job.fsdp > 1 and not is_here:
            events += self._all_gather(group)
        if is_forward:
            events += self._free_gathered(previous)
        events.append(event_of(f"{name} {WEIGHTS}", size, ALL_GATHER))
        if job.fsdp > 1 and not is_forward:
            events.append(event_of(f"{name} {GATHERED}", -size, ALL_GATHER, "gather"))
        return events

    def _all_gather(self, group: Group) -> list[Event]:
        fsdp, number = self.job.fsdp, self.job.number
        size, is_cast = group.gathered(fsdp, number), number < 4 and self.job.profile.weights == "fp32"
        cast = group.gathered(fsdp, number if is_cast else 0) // fsdp
        name = f"{group.name} cast shard"
        return [
            *self._cast_to_float8(group),
            event_of(name, cast, ALL_GATHER, "gather"),
            event_of(f"{group.name} {GATHERED}", size, ALL_GATHER, "gather"),
            event_of(name, -cast, ALL_GATHER, "gather"),
        ]

    def _cast_to_float8(self, group: Group) -> list[Event]:
        """One weight after the other: two scaled fp32 copies, the results beside them."""
        done, most = 0, 0
        for table in group.tables if self.job.fsdp > 1 else ():
            if table.float8:
                numbers = table.rows_of(0) // self.job.fsdp * table.columns
                done += numbers
                most = max(most, done + 8 * numbers)
        return [event_of("float8 weights at work", sign * most, ALL_GATHER, "gather") for sign in (1, -1) if most]

    def _free_gathered(self, group: Group | None) -> list[Event]:
        if group is None or self.job.fsdp == 1 or not self.job.wrapped:
            return []
        size = group.gathered(self.job.fsdp, self.job.number)
        return [event_of(f"{group.name} {GATHERED}", -size, ALL_GATHER, "gather")]

    def _reshard(self, name: str) -> list[Event]:
        if not self.job.wrapped:
            return []
        size = self.groups[name][0].gathered(self.job.fsdp, self.job.number)
        return [event_of(f"{name} {WEIGHTS}", -size, ALL_GATHER)]

    def _reduced(self, group: Group) -> list[Event]:
        """A rank's part of the sum in a dtype below the weights'; that of replicas is held to the backward's end."""
        size = group.padded(self.job.fsdp) // self.job.fsdp * self.job.reduce_number
        is_narrow = self.job.reduce_number < self._weight
        return [event_of("reduced part", size, REDUCE_SCATTER, "reduce")] if is_narrow else []

    @property
    def _weight(self) -> int:
        """Bytes of a number of the weights as they are stored, and of their gradients."""
        return 4 if self.job.profile.weights == "fp32" else 2

    def _free_reduced(self, fresh: bool) -> list[Event]:
        """What replicas hold of all reductions: a part before its cast, or else one that is added to the gradients."""
        if self.job.replicate == 1:
            return []
        found: list[Event] = []
        for group, copies in self.groups.values():
            held = self._reduced(group) or [self._part(group)] * (not fresh)
            found += taken_back(held) * copies
        return found

    def _part(self, group: Group) -> Event:
        """A rank's part of a group's gradients."""
        size = group.padded(self.job.fsdp) // self.job.fsdp * self._weight
        return event_of("gradients", size, "gradients", "reduce")

    def _has_sum(self, first: bool, fresh: bool) -> bool:
        """Whether whole gradients of earlier micro-batches are there."""
        return not first if self.job.pp > 1 else self.job.reduces_once and not fresh

    def _reduces_alone(self, first: bool, fresh: bool, reduces: bool) -> bool:
        """Whether a micro-batch's gradients are reduced without a sum of whole ones."""
        return self.job.wrapped and self.job.pp == 1 and reduces and not self._has_sum(first, fresh)

    def _adds_at_once(self, first: bool, fresh: bool) -> bool:
        """Autograd adds a gradient to one that is there, unless that has been cast for the reduction; or uses it."""
        if not self.job.wrapped:
            return not (first and fresh) or self.job.profile.updates_in_backward
        return self._has_sum(first, fresh) and self.job.number == self.job.reduce_number

    def _finish(self, name: str, first: bool, fresh: bool, reduces: bool, pending: Group | None) -> list[Event]:
        """What becomes of a group's gradients after its backward; `pending`: whose flat buffer is in flight."""
        job, group = self.job, self.groups[name][0]
        if not job.wrapped:
            return []
        has_sum = self._has_sum(first, fresh)
        if self._reduces_alone(first, fresh, reduces):
            return [*self._reshard(name), *self._reduce(group, self._gradients(group, -1), pending, fresh)]
        if has_sum:
            events = [] if self._adds_at_once(first, fresh) else self._sums(group, -1, self.job.number)
        elif job.number == job.reduce_number:  # one becomes the other
            events = [*self._sums(group, -1, job.number), *self._sums(group, 1)]
        else:
            pairs = zip(self._sums(group, 1), self._sums(group, -1, job.number), strict=True)
            events = [event for pair in pairs for event in pair]
        if job.pp > 1:
            return events
        events = [*self._reshard(name), *events]
        return [*events, *self._reduce(group, self._sums(group, -1), pending, True)] if reduces else events

    def _after(self, name: str, reduces: bool) -> Group | None:
        """The group whose flat buffer is in flight when `_finish` is over."""
        is_reduced = self.job.wrapped and self.job.pp == 1 and reduces
        return self._in_flight(self.groups[name][0]) if is_reduced else None

    def _reduce(self, group: Group, freed: list[Event], pending: Group | None, fresh: bool) -> list[Event]:
        size = group.padded(self.job.fsdp) * self.job.reduce_number
        part = self._part(group)
        narrow = self._reduced(group)  # cast after the reduction
        made = [*narrow, part, *([] if self.job.replicate > 1 else taken_back(narrow))]
        pool = self.job.profile.flat_pool
        events = [*self._free_flat(pending), event_of(f"{group.name} {FLAT_GRADIENTS}", size, REDUCE_SCATTER, pool)]
        if self.job.fsdp > 1:  # torch's loop variable holds the last parameter's gradient until the function returns
            events += [*freed[:-1], *made, *freed[-1:]]
        else:  # copied, not reduced, by way of a quotient by the divide factor
            copy = event_of("divided copy", size, REDUCE_SCATTER, "reduce")
            undone = copy._replace(size=-size)
            events += [*freed, copy, undone, *made] if narrow else [*freed, copy, *made, undone]
        events += self._free_flat(None if self._in_flight(group) else group)
        is_held = self.job.replicate > 1 and not narrow
        return events if fresh or is_held else [*events, part._replace(size=-part.size)]

    def _in_flight(self, group: Group) -> Group | None:
        """Its flat buffer is held until the next one is made, unless the stream that reads it has allocated it."""
        return group if self.job.profile.flat_pool == "main" else None

    def _sums(self, group: Group, sign: int, number: int = 0) -> list[Event]:
        """Whole gradients summed over micro-batches, in the reduction's dtype; with `number`, new ones in compute's."""
        name, term = ("gradient", self._gradient_term) if number else ("sum", REDUCE_SCATTER)
        number = number or self.job.reduce_number
        return [event_of(f"{name} of {table}", sign * number * numbers, term) for table, numbers in group.numbers]

    @property
    def _own_table(self) -> int:
        return -(-self.shape.model.vocab_size // self.job.tp) * self.shape.model.dim

    def _free_flat(self, group: Group | None) -> list[Event]:
        if group is None:
            return []
        size, pool = group.padded(self.job.fsdp) * self.job.reduce_number, self.job.profile.flat_pool
        return [event_of(f"{group.name} {FLAT_GRADIENTS}", -size, REDUCE_SCATTER, pool)]

    def _gradients(self, group: Group, sign: int) -> list[Event]:
        return self._sums(group, sign, self.job.number)

    def reduction(self, *, fresh: bool) -> Segment:
        """Pipelining reduces all gradients of a stage after its last backward."""
        if ("reduction", fresh) not in self._segments:
            self._segments["reduction", fresh] = self._reduction(fresh)
        return self._segments["reduction", fresh]

    def _reduction(self, fresh: bool) -> Segment:
        parts: list[Segment] = []
        pending: Group | None = None
        if not self.job.wrapped:
            return Segment.of([])
        for name, (group, copies) in self.groups.items():
            for _ in range(min(copies, 2)):  # the third and all others are as the second
                events = [*self._reshard(name), *self._reduce(group, self._sums(group, -1), pending, fresh)]
                parts.append(Segment.of(events, name))
                pending = self._in_flight(group)
            parts += parts[-1:] * (copies - 2)
        end = Segment.of([*self._free_flat(pending), *self._free_reduced(fresh)], "end")
        return Segment.join([*parts, end], "reduction")


def event_of(name: str, size: int, term: str, pool: str = "main") -> Event:
    return Event(name, 0, size, term, pool)
