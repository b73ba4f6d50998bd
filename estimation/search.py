"""The fastest compositions of a model on a number of GPUs that fit: all valid ones, pruned by bounds, then predicted.

A bound never exceeds the prediction that it stands for, so what it drops could not have been among the best.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from estimation.candidates import STAGES, Fixed, Group, always_wrong, groups, meshes, variants
from estimation.compiled_block import compiled_forward
from estimation.devices import GIB, Device
from estimation.float8 import Float8
from estimation.formula import RankMemory, memory_of
from estimation.job import Job, job_of
from estimation.program import Shape
from estimation.report import worst_rank
from estimation.stage import block_ops, written_block
from estimation.tape import Mode, kept, sizes_of
from estimation.time.block import coster_of
from estimation.time.step import StepTime, step_time
from estimation.time.way import way_of
from titan_like.config import Config
from titan_like.config.composition import stage_count
from titan_like.config.errors import ConfigError, TitanError
from titan_like.config.schema import SPLIT_BACKWARD
from titan_like.models.flavors import parameter_count

SHOWN, KEPT = 10, 16  # rows that are printed, and drawn


@dataclass(frozen=True, order=True)
class Found:
    """A composition that fits, with its predictions; ordered by step time."""

    seconds: float
    config: Config = field(compare=False)
    step: StepTime = field(compare=False, repr=False)
    ranks: list[RankMemory] = field(compare=False, repr=False)

    @property
    def worst(self) -> RankMemory:
        return worst_rank(self.ranks)

    @property
    def reserved_bytes(self) -> int:
        return sum(self.worst.peak.pools)


@dataclass
class Result:
    """The best first; how many were not dropped by a bound, and how many of these were predicted in full."""

    best: list[Found] = field(default_factory=list)
    groups: int = 0
    valid: int = 0
    timed: int = 0
    predicted: int = 0


def search(base: Config, gpus: int, device: Device, sequences: int, fixed: Fixed) -> Result:
    """The fastest compositions for optimizer steps of `sequences` sequences of base.training.seq_len tokens.

    Args:
        base: of it, searched keys have their defaults.
        fixed: values of searched keys, which all compositions then have.

    Raises:
        ConfigError: nothing is valid.
        TitanError: nothing fits.
    """
    result = Result()
    capacity = _capacity(device, 1)
    found = _groups(base, gpus, device, sequences, fixed, capacity, result)
    bounded = sorted(found, key=lambda item: item[0])
    for bound, group in bounded:
        if bound >= _limit(result):
            break
        for config in variants(group, gpus, fixed):
            if bound * _fill(config) / least_fill(group, fixed) >= _limit(result):
                continue
            result.valid += 1
            job = job_of(config, gpus)
            if least_bytes(job, _in_flight(job)) <= capacity:
                _predict(config, job, device, result)
    if not result.best:
        raise _nothing(base, gpus, device, sequences, fixed, result, is_refused=bool(bounded) and not result.valid)
    return result


def _capacity(device: Device, communicators: int) -> int:
    """Bytes for the allocator."""
    return int((device.memory_gib - device.outside(communicators)) * GIB)


def _limit(result: Result) -> float:
    return result.best[-1].seconds if len(result.best) >= KEPT else float("inf")


def _predict(config: Config, job: Job, device: Device, result: Result) -> None:
    result.timed += 1
    step = step_time(job, device, way_of(config))
    if step.seconds >= _limit(result):
        return
    result.predicted += 1
    ranks, capacity = memory_of(job), _capacity(device, job.communicators)
    if all(sum(rank.peak.pools) <= capacity for rank in ranks):  # the first that does not fit ends it
        insort(result.best, Found(step.seconds, config, step, ranks))
        del result.best[KEPT:]


def _groups(
    base: Config, gpus: int, device: Device, sequences: int, fixed: Fixed, capacity: int, result: Result
) -> Iterator[tuple[float, Group]]:
    """(seconds that it needs at least, group) of all that may fit."""
    for mesh in meshes(base, gpus, fixed):
        for group in groups(mesh, gpus, sequences, fixed):
            result.groups += 1
            job = job_of(group.sample, gpus)
            if least_bytes(job, 1) <= capacity:
                yield least_seconds(group, job, device) * least_fill(group, fixed), group


def least_bytes(job: Job, in_flight: int) -> int:
    """What the fullest rank holds at least: an even part of the parameters with their gradients and states, whole
    weights and gradients under pipelining, and the activations of `in_flight` passes between forward and backward."""
    numbers = parameter_count(job.model) // (job.pp * job.tp)
    states = 8 if job.optimizer == "adamw" else 0
    weight = 1 if job.float8 and job.float8.gathered else job.number
    whole = (weight + job.reduce_number) * numbers if job.pp > 1 and job.wrapped and not job.reshard else 0
    kinds = {job.products_of(layer) for layer in range(job.model.n_layers)}
    least = min(_block_bytes(job.shape, _lightest(job), job.float8, names) for names in kinds)
    blocks = least * (job.model.n_layers // len(job.stages))
    return (4 + states) * numbers // job.fsdp + whole + blocks * in_flight


def _lightest(job: Job) -> Mode:
    return "full" if isinstance(job.recompute, int) else job.recompute


@lru_cache(maxsize=4096)
def _block_bytes(shape: Shape, mode: Mode, casts: Float8 | None, names: frozenset[str]) -> int:
    if shape.compiled:  # but for its input, in the place of which is its result
        block = written_block(shape, casts, names, is_op=mode == "op")
        return sum(event.size for event in compiled_forward(block, mode))
    ops = block_ops(shape, casts, names)
    sizes = {"x": shape.hidden, **sizes_of(ops)}
    return sum(sizes[name] for name in kept(ops, mode) if name != "out")


def _in_flight(job: Job) -> int:
    """The largest number of passes between forward and backward on any rank (of its stages together)."""
    highest = 0
    for row in job.actions[:1] + job.actions[-1:]:
        count = 0
        for action in row:
            count += (action.kind == "F") - (action.kind in "BW")
            highest = max(highest, count)
    return highest


def least_seconds(group: Group, job: Job, device: Device) -> float:
    """What an average rank works at least, without waiting."""
    coster = coster_of(job, way_of(group.sample), device)
    modes = Counter(job.mode_of(layer) for layer in range(job.model.n_layers))
    layers = sum(times * sum(coster.unit("block", mode).totals) for mode, times in modes.items())
    ends = sum(coster.unit("embedding", "none").totals) + sum(coster.unit("head", "none").totals)
    return (layers + ends) * (group.sequences // group.rows) / job.pp


def _fill(config: Config) -> float:
    """How much longer a schedule takes than its work, at least: with equal stages and nothing to send."""
    parallelism = config.parallelism
    pp, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if pp == 1:
        return 1.0
    chunks = 6 * batches if name in SPLIT_BACKWARD else batches * stage_count(config) // pp
    return (chunks + pp - 1) / chunks


def least_fill(group: Group, fixed: Fixed) -> float:
    """The same of all schedules, at least."""
    parallelism = group.sample.parallelism
    pp, split = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_split
    chunks = max(6, fixed.get(STAGES, 0), (len(split) + 1) // pp) * group.batches
    return (chunks + pp - 1) / chunks if pp > 1 else 1.0


def _nothing(
    base: Config, gpus: int, device: Device, sequences: int, fixed: Fixed, result: Result, *, is_refused: bool
) -> TitanError:
    model, options = f"{base.model.name} {base.model.flavor} on {gpus} GPUs", ", ".join(f"--{key}" for key in fixed)
    if wrong := [] if result.groups else always_wrong(base, gpus, fixed):
        return ConfigError(*wrong)
    if not result.groups:
        return ConfigError(
            f"no composition of {model} takes {sequences} sequences of {base.training.seq_len} tokens per step; choose "
            "--gpus and --global_batch_tokens such that the sequences can be shared out evenly"
            f"{f', or leave out one of {options}' if fixed else ''}"
        )
    if is_refused:
        return ConfigError(f"the trainer runs no composition of {model} with {options}; leave one of these out")
    return TitanError(
        f"no composition of {model} fits {device.name} with {device.memory_gib:.2f} GiB; use more GPUs, or a device "
        f"with more memory{f', or leave out one of {options}' if fixed else ''}"
    )
