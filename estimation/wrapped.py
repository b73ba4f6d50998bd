"""What FSDP2 holds of a stage's groups: gathered weights, whole gradients and their sums, their reduction.

Sizes are bytes, of the first tensor-parallel rank. Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from collections.abc import Callable

from estimation.groups import Group, groups_of
from estimation.job import Job
from estimation.tape import Event, Segment
from estimation.types import ALL_GATHER, REDUCE_SCATTER

WEIGHTS, GATHERED, FLAT_GRADIENTS = "gathered weights", "all-gather buffer", "reduce-scatter buffer"


class GroupMemory:
    """Builds segments, and lists of events for parts of segments; segments that are equal are built once."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.shape = job, job.shape
        self.is_first, self.is_last = number == 0, number == len(job.stages) - 1
        self.layers = job.stages[number]
        together = job.profile.groups == "together"
        self.groups = groups_of(
            job.model, job.tp, layers=len(self.layers), first=self.is_first, last=self.is_last, together=together
        )
        self._segments: dict[tuple[object, ...], Segment] = {}

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

    def rows_of_table(self) -> Segment:
        """Without FSDP2 the embedding's gradient is whole on tensor-parallel ranks until the step has run."""
        if self.job.wrapped or "embedding" not in self.groups or not self._has_whole_sum(self.groups["embedding"][0]):
            return Segment.of([])
        whole = self._sums(self.groups["embedding"][0], -1, self.job.number)
        return Segment.of([whole[0]._replace(size=self._own_table * self.job.number), *whole], "optimizer")

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
                made = self._sums(group, -1, self.job.number)
                events += [*made, *self._sums(group, 1)] if first else made
        return Segment.of(events, "accumulation")

    def _keeps(self, group: str, layer: int | None = None) -> bool:
        """Whether a group stays gathered between a forward and its backward."""
        profile = self.job.profile
        is_last_block = group == "block" and layer == self.layers[-1] and profile.last_block_stays
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
        size = group.padded(job.fsdp) * job.number
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
        size = group.padded(self.job.fsdp) * self.job.number
        cast = size // self.job.fsdp if self.job.number < 4 and self.job.profile.weights == "fp32" else 0
        name = f"{group.name} cast shard"
        return [
            event_of(name, cast, ALL_GATHER, "gather"),
            event_of(f"{group.name} {GATHERED}", size, ALL_GATHER, "gather"),
            event_of(name, -cast, ALL_GATHER, "gather"),
        ]

    def _free_gathered(self, group: Group | None) -> list[Event]:
        if group is None or self.job.fsdp == 1 or not self.job.wrapped:
            return []
        return [
            event_of(f"{group.name} {GATHERED}", -group.padded(self.job.fsdp) * self.job.number, ALL_GATHER, "gather")
        ]

    def _reshard(self, name: str) -> list[Event]:
        if not self.job.wrapped:
            return []
        size = self.groups[name][0].padded(self.job.fsdp) * self.job.number
        return [event_of(f"{name} {WEIGHTS}", -size, ALL_GATHER)]

    def _reduced(self, group: Group) -> list[Event]:
        """A rank's part of the sum in a dtype below fp32; that of replicas is held to the backward's end."""
        size = group.padded(self.job.fsdp) // self.job.fsdp * self.job.reduce_number
        return [event_of("reduced part", size, REDUCE_SCATTER, "reduce")] if self.job.reduce_number < 4 else []

    def _free_reduced(self) -> list[Event]:
        if self.job.replicate == 1:
            return []
        return [event for group, copies in self.groups.values() for event in taken_back(self._reduced(group)) * copies]

    def _has_sum(self, first: bool, fresh: bool) -> bool:
        """Whether whole gradients of earlier micro-batches are there."""
        return not first if self.job.pp > 1 else self.job.reduces_once and not fresh

    def _reduces_alone(self, first: bool, fresh: bool, reduces: bool) -> bool:
        """Whether a micro-batch's gradients are reduced without a sum of whole ones."""
        return self.job.wrapped and self.job.pp == 1 and reduces and not self._has_sum(first, fresh)

    def _adds_at_once(self, first: bool, fresh: bool) -> bool:
        """Autograd adds a gradient to one that is there, unless that has been cast for the reduction."""
        if not self.job.wrapped:
            return not (first and fresh)
        return self._has_sum(first, fresh) and self.job.number == self.job.reduce_number

    def _finish(
        self, name: str, first: bool, fresh: bool, reduces: bool, pending: Group | None
    ) -> tuple[list[Event], Group | None]:
        """What becomes of a group's gradients after its backward; also the group whose flat buffer is in flight."""
        job, group = self.job, self.groups[name][0]
        if not job.wrapped:
            return [], None
        has_sum = self._has_sum(first, fresh)
        if self._reduces_alone(first, fresh, reduces):
            freed = self._gradients(group, -1)
            return [*self._reshard(name), *self._reduce(group, freed, pending, fresh)], group
        if has_sum:
            events = [] if self._adds_at_once(first, fresh) else self._sums(group, -1, self.job.number)
        elif job.number == job.reduce_number:  # one becomes the other
            events = [*self._sums(group, -1, job.number), *self._sums(group, 1)]
        else:
            pairs = zip(self._sums(group, 1), self._sums(group, -1, job.number), strict=True)
            events = [event for pair in pairs for event in pair]
        if job.pp > 1:
            return events, None
        events = [*self._reshard(name), *events]
        if not reduces:
            return events, None
        return [*events, *self._reduce_sums(group, pending, fresh=True)], group

    def _reduce_sums(self, group: Group, pending: Group | None, *, fresh: bool) -> list[Event]:
        """The table's sum is whole under tensor parallelism; each rank takes its rows."""
        events, freed = [], self._sums(group, -1)
        if self._has_whole_sum(group):
            own = event_of("rows of the sum", self._own_table * self.job.reduce_number, REDUCE_SCATTER)
            events, freed = [own, freed[0]], [*freed[1:], own._replace(size=-own.size)]
        return [*events, *self._reduce(group, freed, pending, fresh)]

    def _reduce(self, group: Group, freed: list[Event], pending: Group | None, fresh: bool) -> list[Event]:
        size = group.padded(self.job.fsdp) * self.job.reduce_number
        part = event_of("gradients", group.padded(self.job.fsdp) // self.job.fsdp * 4, "gradients", "reduce")
        narrow = self._reduced(group)  # cast after the reduction
        made = [*narrow, part, *([] if self.job.replicate > 1 else taken_back(narrow))]
        events = [*self._free_flat(pending), event_of(f"{group.name} {FLAT_GRADIENTS}", size, REDUCE_SCATTER)]
        if self.job.fsdp > 1:  # torch's loop variable holds the last parameter's gradient until the function returns
            events += [*freed[:-1], *made, *freed[-1:]]
        else:  # copied, not reduced, by way of a quotient by the divide factor
            copy = event_of("divided copy", size, REDUCE_SCATTER, "reduce")
            undone = copy._replace(size=-size)
            events += [*freed, copy, undone, *made] if narrow else [*freed, copy, *made, undone]
        return events if fresh else [*events, event_of("gradients", -part.size, "gradients", "reduce")]

    def _sums(self, group: Group, sign: int, number: int = 0) -> list[Event]:
        """Whole gradients summed over micro-batches, in the reduction's dtype; with `number`, new ones in compute's."""
        name, term = ("gradient", self._gradient_term) if number else ("sum", REDUCE_SCATTER)
        number = number or self.job.reduce_number
        events = [event_of(f"{name} of {t.name}", sign * number * t.rows_of(0) * t.columns, term) for t in group.tables]
        if self._has_whole_sum(group):
            table = group.tables[0]
            events[0] = events[0]._replace(size=sign * number * table.rows * table.columns)
        return events

    def _has_whole_sum(self, group: Group) -> bool:
        """The embedding's gradient is whole on every tensor-parallel rank until something asks for the rank's rows."""
        return self.job.tp > 1 and group.name == "embedding"

    @property
    def _own_table(self) -> int:
        return -(-self.shape.model.vocab_size // self.job.tp) * self.shape.model.dim

    def _free_flat(self, group: Group | None) -> list[Event]:
        if group is None:
            return []
        return [
            event_of(
                f"{group.name} {FLAT_GRADIENTS}", -group.padded(self.job.fsdp) * self.job.reduce_number, REDUCE_SCATTER
            )
        ]

    def _gradients(self, group: Group, sign: int) -> list[Event]:
        number = sign * self.job.number
        return [
            event_of(f"gradient of {t.name}", number * t.rows_of(0) * t.columns, self._gradient_term)
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
                events += [*self._reshard(name), *self._reduce_sums(group, pending, fresh=fresh)]
                pending = group
        return Segment.of([*events, *self._free_flat(pending), *self._free_reduced()], "reduction")


def event_of(name: str, size: int, term: str, pool: str = "main") -> Event:
    return Event(name, 0, size, term, pool)


def taken_back(events: list[Event]) -> list[Event]:
    return [event._replace(size=-event.size) for event in events]
