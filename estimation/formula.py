"""Memory of every rank in closed form: sizes from the config, the order of allocations from the trainer's own rules.

Imports no torch unless a pipeline schedule has several stages per rank. docs/memory.md explains every term.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from estimation.flat import FlatStageMemory
from estimation.job import Job
from estimation.run import Run, left_gradients, messages
from estimation.stage import Blocks, StageMemory
from estimation.tape import Event, Segment
from estimation.types import INPUTS, TRANSIENT, MemoryReport, Moment, Resident

FRAGMENTATION = "fragmentation inside an allocator pool: reserved is the sum of the pools' peaks"
NOT_INCLUDED = (
    "memory outside torch's allocator: the device context, communicators, and libraries (added to see whether it fits)",
    "workspaces and temporaries inside kernels (matrix libraries, flash attention, sorting in an embedding's backward)",
    FRAGMENTATION,
)


@dataclass(frozen=True)
class Peak:
    """The highest moment of a rank.

    Attributes:
        log: the segments of a step up to the one that reaches it.
        pools: the largest number of bytes of each allocator pool, each at its own time.
    """

    allocated: int
    log: tuple[Segment, ...]
    pools: tuple[int, ...]

    @cached_property
    def label(self) -> str:
        """Which part of the step reaches it."""
        return self.log[-1].up_to_rise()[1]

    @cached_property
    def terms(self) -> Counter[tuple[str, str]]:
        """Bytes of each (term, tensor) alive then."""
        times = Counter(map(id, self.log[:-1]))
        found = self.log[-1].up_to_rise()[0]
        for segment in {id(segment): segment for segment in self.log[:-1]}.values():
            for key, size in segment.total().items():
                found[key] += size * times[id(segment)]
        return Counter({key: size for key, size in found.items() if size})


class RankMemory:
    """One rank of the pipeline axis, as its largest data- and tensor-parallel rank (index 0) sees it."""

    def __init__(
        self, job: Job, pipeline_rank: int, stages: dict[int, StageMemory], *, fsdp_rank: int = 0, tp_rank: int = 0
    ) -> None:
        self.job, self.pipeline_rank, self.stages = job, pipeline_rank, stages
        self.actions = job.actions[pipeline_rank]
        self.fsdp_rank, self.tp_rank = fsdp_rank, tp_rank

    @cached_property
    def resident(self) -> Resident:
        """Bytes that stay; exact, with the uneven parts that DTensor and FSDP2 give to this rank."""
        parameters = gradients = optimizer = 0
        for stored, held, copies in self._parts():
            parameters += stored * copies
            gradients += held * copies
            optimizer += sum(self.job.state_sizes(held)) * copies
        weight = 4 if self.job.profile.weights == "fp32" else 2
        buffers = self.job.seq_len // self.job.cp * 8 if self.job.cp > 1 else 0
        return Resident(parameters * weight, gradients * weight, optimizer, buffers)

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        for stage in self.stages.values():
            yield from stage.parts(self.fsdp_rank, self.tp_rank)

    @cached_property
    def start(self) -> Segment:
        """What is there before the first step."""
        resident, job = self.resident, self.job
        events = [("parameters", "parameters", resident.parameters)]
        events += [("buffers", "indices of the sequence", resident.buffers), (INPUTS, "batch", job.input_bytes)]
        first = Segment.of((Event(name, 0, size, term) for term, name, size in events if size), "start")
        receive = sum(stage.receive_buffers for stage in self.stages.values()) // job.shape.hidden
        counts = (("receive buffers", receive), ("gradients of buffers", left_gradients(self.actions, self.stages)))
        held = [messages(name, job.shape.hidden, count) for name, count in counts]
        states = [stage.states(self.fsdp_rank, self.tp_rank) for stage in self.stages.values()]
        return Segment.join([first, *held, *(states if job.profile.step_state else [])], "start")

    def steps(self) -> Iterator[Segment]:
        """The segments of one optimizer step after its start."""
        runs = min(self.job.accumulation, 3)  # the first, any in the middle, the last
        for run in range(runs):
            yield from Run(self.job, self.actions, self.stages, fresh=run == 0, is_last=run == runs - 1).segments()

    def update(self, *, first: bool) -> Segment:
        """The optimizer; in the `first` step some trainers make its states here."""
        parts: list[Segment] = []
        if first and not self.job.profile.step_state:
            parts = [stage.states(self.fsdp_rank, self.tp_rank) for stage in self.stages.values()]
        if self.job.updates_together or self.job.profile.foreach_update:
            sizes = [sign * held * 4 for sign in (1, -1) for _, held, copies in self._parts() for _ in range(copies)]
            parts.append(Segment.of(Event("optimizer temporaries", 0, size, "optimizer") for size in sizes))
        return Segment.join(parts, "optimizer")

    @cached_property
    def peak(self) -> Peak:
        """Of the second step, when all that stays is there; of the first one where `only_first_step`."""
        log = [self.start]
        if not self.job.only_first_step and not self.job.profile.step_state:
            log.append(self.update(first=True))
        begin = len(log)
        now, main, gather, reduce = (sum(deltas) for deltas in zip(*(part.delta for part in log), strict=True))
        highest, at, most_main, most_gather, most_reduce = now, begin - 1, main, gather, reduce
        log += [*self.steps(), self.update(first=self.job.only_first_step)]
        for index in range(begin, len(log)):  # thousands, so no inner loop over the pools
            rise, rise_main, rise_gather, rise_reduce = log[index].rise
            if now + rise > highest:
                highest, at = now + rise, index
            if main + rise_main > most_main:
                most_main = main + rise_main
            if gather + rise_gather > most_gather:
                most_gather = gather + rise_gather
            if reduce + rise_reduce > most_reduce:
                most_reduce = reduce + rise_reduce
            delta, delta_main, delta_gather, delta_reduce = log[index].delta
            now, main, gather, reduce = now + delta, main + delta_main, gather + delta_gather, reduce + delta_reduce
        return Peak(highest, tuple(log[: at + 1]), (most_main, most_gather, most_reduce))

    def report(self) -> MemoryReport:
        """In the words that both engines share."""
        peak, job = self.peak, self.job
        at_peak: Counter[str] = Counter()
        activations: Counter[str] = Counter()
        for (term, name), size in peak.terms.items():
            at_peak[term] += size
            if term == "activations":
                activations[name] += size
        first, _, rest = peak.label.partition(" ")
        return MemoryReport(
            rank=self.pipeline_rank * job.replicate * job.fsdp * job.tp,
            world_size=job.world_size,
            resident=self.resident,
            activations=dict(activations),
            transient={kind: at_peak[kind] for kind in TRANSIENT if at_peak[kind]},
            peak_bytes=peak.allocated,
            at_peak=dict(at_peak),
            moment=Moment(2, first or "forward", rest, "formula"),
            reserved_bytes=sum(peak.pools),
            not_included=NOT_INCLUDED,
        )


def memory_of(job: Job) -> list[RankMemory]:
    """One entry per rank of the pipeline axis. Stages that are alike share what is computed of them, and all share
    what is computed of a block."""
    alike: dict[tuple[object, ...], StageMemory] = {}
    blocks, kind_of_stage = Blocks(), FlatStageMemory if job.profile.flat else StageMemory
    ranks = []
    for rank, actions in enumerate(job.actions):
        stages = {}
        for number in sorted({action.stage for action in actions}):
            layers = job.stages[number]
            kinds = tuple((job.mode_of(layer), job.products_of(layer)) for layer in layers)
            key = (number == 0, number == len(job.stages) - 1, kinds)
            if key not in alike:
                alike[key] = kind_of_stage(job, number, blocks)
            stages[number] = alike[key]
        ranks.append(RankMemory(job, rank, stages))
    return ranks
