"""Step time of a job on a device, and what it is made of. docs/step_time.md explains it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from estimation.devices import Device
from estimation.job import Job
from estimation.schedules import Action
from estimation.time.block import Coster, coster_of
from estimation.time.network import Network
from estimation.time.overlap import COPIES, FSDP, Pass
from estimation.time.pipeline import Ran, simulate
from estimation.time.seconds import Seconds
from estimation.time.stage import StageTime, stage_times
from estimation.time.way import Way
from titan_like.models.flavors import flops_per_token

BUBBLE, UPDATE = "pipeline bubble", "clipping and optimizer"
NOT_INCLUDED = (
    "time of the host: where kernels are short, a GPU waits for Python (small models, eager tensor parallelism)",
    "loading data, validation, checkpoints, and ranks that wait for a slower one",
    "other traffic on the network, and clocks below those of the published measurements",
)


@dataclass(frozen=True)
class StepTime:
    """A prediction of one optimizer step.

    Attributes:
        seconds: of the step.
        tokens_per_second: of one device.
        mfu: share of the bf16 peak, as the trainer counts it.
        rank: the pipeline rank that works longest.
        parts: its seconds by kind; they sum to `seconds`.
        ran: when every pipeline rank ran what, for one loaded micro-batch.
        stages: what the actions consist of.
    """

    seconds: float
    tokens_per_second: float
    mfu: float
    rank: int
    parts: Seconds
    ran: Sequence[Sequence[Ran]] = field(repr=False)
    stages: Sequence[StageTime] = field(repr=False)

    @property
    def bubble(self) -> float:
        """Share of the step in which `rank` waits for other ranks of the pipeline; 0 without pipelining."""
        return self.parts.get(BUBBLE, 0.0) / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(seconds for kind, seconds in self.parts.items() if kind.endswith("(exposed)"))


def step_time(job: Job, device: Device, way: Way) -> StepTime:
    """Seconds of an optimizer step.

    Raises:
        ConfigError: the device lacks what `way` needs.
    """
    coster = coster_of(job, way, device)
    stages = stage_times(coster)
    ran, parts, rank = _whole(job, stages[0]) if job.pp == 1 else _pipelined(job, stages, coster.network)
    parts[UPDATE] = max(_update(job, coster, stages, row) for row in job.actions)
    seconds = parts.total
    tokens = job.batch_rows * job.accumulation * job.seq_len / (job.cp * job.tp * job.pp)
    mfu = flops_per_token(job.model, job.seq_len) * tokens / seconds / (device.tflops * 1e12)
    return StepTime(seconds, tokens / seconds, mfu, rank, parts, ran, stages)


def _whole(job: Job, stage: StageTime) -> tuple[list[list[Ran]], Seconds, int]:
    """Without pipelining: the first of a step's micro-batches gathers what stays, the last one reduces."""
    gathering = job.accumulation if job.reshard else 1
    reducing = 1 if job.reduces_once else job.accumulation
    runs = {("F", True): gathering, ("F", False): job.accumulation - gathering,
            ("B", True): reducing, ("B", False): job.accumulation - reducing}  # fmt: skip
    parts = Seconds()
    for (kind, flag), times in runs.items():
        if times:
            parts.add(stage.run(kind, flag).parts, times)
    forward = stage.run("F", True).seconds
    backward = stage.run("B", not job.reduces_once or job.accumulation == 1).seconds
    ran = [Ran(Action("F", 0, 0), 0.0, forward), Ran(Action("B", 0, 0), forward, forward + backward)]
    return [ran], parts, 0


def _pipelined(job: Job, stages: Sequence[StageTime], network: Network) -> tuple[list[list[Ran]], Seconds, int]:
    passes = _passes(job, stages)
    message = network.send(job.shape.hidden, job.world_size // job.pp)
    ran = simulate(job.actions, len(stages), {action: run.seconds for action, run in passes.items()}, message)
    ends = [_reduced(row, stages) for row in ran]
    busy = [sum(each.end - each.start for each in row) for row in ran]
    longest = max(range(job.pp), key=busy.__getitem__)
    parts = Seconds()
    runs = [passes[action] for action in job.actions[longest]]
    for number, times in Counter(map(id, runs)).items():
        parts.add(next(run for run in runs if id(run) == number).parts, times)
    packing = sum(stages[number].reduction[0] for number in {action.stage for action in job.actions[longest]})
    tail = ends[longest] - ran[longest][-1].end  # packing for one stage may be hidden by another stage's work
    parts.add({COPIES: min(packing, tail), FSDP: tail - min(packing, tail)})
    parts[BUBBLE] = max(0.0, max(ends) - parts.total)
    return ran, Seconds().add(parts, job.accumulation), longest


def _passes(job: Job, stages: Sequence[StageTime]) -> dict[Action, Pass]:
    """What every action is; the first forward of a stage gathers its weights, gradients are reduced at the end."""
    later = {
        (kind, stage): stages[stage].run(kind, kind == "F" and job.reshard)
        for kind, stage in {(action.kind, action.stage) for row in job.actions for action in row}
    }
    found = {action: later[action.kind, action.stage] for row in job.actions for action in row}
    begun: set[int] = set()
    for action in (action for row in job.actions for action in row if action.kind == "F"):
        if action.stage not in begun:
            begun.add(action.stage)
            found[action] = stages[action.stage].run("F", True)
    return found


def _reduced(row: Sequence[Ran], stages: Sequence[StageTime]) -> float:
    """When a rank is done: a stage's gradients are reduced after its last backward, beside what other stages do."""
    line = 0.0
    last = {each.action.stage: each.end for each in row}
    for stage, end in sorted(last.items(), key=lambda item: item[1]):
        pack, reduce = stages[stage].reduction
        line = max(line, end + pack) + reduce
    return max(line, row[-1].end)


def _update(job: Job, coster: Coster, stages: Sequence[StageTime], actions: Sequence[Action]) -> float:
    """The norm and the clipping read, read and write gradients; AdamW reads four numbers and writes three.

    One operation at a time, those are twenty numbers: it decays the weight (2), moves the first (3) and the second
    moment (2 and 3), takes its root (2), scales that and adds to it (2 each), and updates (4); torch/optim/adam.py.
    """
    numbers = sum(stages[number].numbers for number in {action.stage for action in actions})
    weight, state = (4 if job.profile.weights == "fp32" else 2), {"fp32": 4, "bf16": 2, "8bit": 1}[job.profile.adam]
    states = 4 * state if job.optimizer == "adamw" else 0
    if states and coster.way.update == "foreach":
        states += 3 * weight + 10 * state
    return coster.speed.moving(numbers * (6 * weight + states))
