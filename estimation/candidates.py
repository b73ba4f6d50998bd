"""All compositions of a model on a number of GPUs that the trainer would run: mesh, schedule, micro-batch, recompute.

Valid is what the trainer's own checks pass; nothing of them is repeated here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from titan_like.config import Config
from titan_like.config.schema import SCHEDULES, SINGLE_STAGE, V_SHAPED, Compile
from titan_like.launch import check_settings

VIRTUAL = (2, 4)  # stages per rank that are tried
MICRO_BATCHES_PER_RANK = 4  # of the pipeline, in one run of the schedule; the rest of a batch is accumulated
RECOMPUTE: tuple[tuple[str, str | int], ...] = (("none", "op"), ("selective", "op"), ("selective", 2), ("full", "op"))
PP, TP = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
CP, REPLICATE = "parallelism.context_parallel_degree", "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
SCHEDULE, STAGES = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_virtual_stages"
BATCH, MICRO_BATCH = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
MODE, OPTION, COMPILE = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option", "compile.enable"
SEARCHED = (PP, TP, CP, REPLICATE, SHARD, SCHEDULE, STAGES, BATCH, MICRO_BATCH, MODE, OPTION, COMPILE)
Fixed = Mapping[str, Any]  # values of searched keys that all compositions must have


def changed(config: Config, keys: dict[str, Any]) -> Config:
    """`config` with other values ("section.key"); they are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    return config.model_copy(update=update)


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def problems(config: Config, world_size: int) -> list[str]:
    """What the trainer would refuse before it opens any data; its folders are not looked at."""
    unwritten = changed(config, {"comm.mode": "fake", "comm.fake_rank": 0})  # in this mode it writes nothing
    return check_settings(unwritten, world_size)


def meshes(base: Config, gpus: int, fixed: Fixed) -> Iterator[Config]:
    """Valid degrees of every axis, with one sequence per step and rank."""
    for mesh in _degrees(base, gpus, fixed):
        if not problems(_trial(mesh), gpus):
            yield mesh


def always_wrong(base: Config, gpus: int, fixed: Fixed) -> list[str]:
    """What the trainer says of every mesh."""
    told = [problems(_trial(mesh), gpus) for mesh in _degrees(base, gpus, fixed)]
    return [problem for problem in told[0] if all(problem in other for other in told)] if told else []


def _trial(mesh: Config) -> Config:
    return changed(mesh, {BATCH: mesh.parallelism.pipeline_parallel_degree, "training.global_batch_size": -1})


def _degrees(base: Config, gpus: int, fixed: Fixed) -> Iterator[Config]:
    for pp in divisors(gpus):
        for tp in divisors(gpus // pp):
            for cp in divisors(gpus // (pp * tp)):
                for replicate in divisors(gpus // (pp * tp * cp)):
                    keys = {PP: pp, TP: tp, CP: cp, REPLICATE: replicate, SHARD: gpus // (pp * tp * cp * replicate)}
                    if keeps(keys, fixed):  # variants turn compilation off where it is refused
                        yield changed(base, {**keys, SHARD: -1, COMPILE: fixed.get(COMPILE, True)})


def keeps(keys: Mapping[str, Any], fixed: Fixed) -> bool:
    return all(fixed.get(key, value) == value for key, value in keys.items())


@dataclass(frozen=True)
class Group:
    """Compositions that compute the same, and differ in when.

    Attributes:
        rows: sequences that are computed together; sequences: of an optimizer step, of one data-parallel rank.
        batches: micro-batches of one run of a pipeline's schedule.
        sample: one of them: the smallest batch that fills the pipeline. It need not be valid.
    """

    rows: int
    sequences: int
    batches: int
    sample: Config


def groups(mesh: Config, gpus: int, sequences: int, fixed: Fixed) -> Iterator[Group]:
    """All micro-batch sizes and recompute modes of a mesh, for optimizer steps of `sequences` sequences."""
    pp, readers = mesh.parallelism.pipeline_parallel_degree, gpus // _ranks_per_reader(mesh)
    if sequences % readers:
        return
    for rows in divisors(sequences // readers):
        batches = _batches(rows, sequences // readers, pp, fixed.get(BATCH))
        for mode, option in dict.fromkeys((*RECOMPUTE, ("selective", fixed.get(OPTION, "op")))):
            keys = {MODE: mode, OPTION: option, MICRO_BATCH: rows if pp > 1 else 1}
            if batches and keeps(keys, fixed):
                sample = changed(mesh, {**keys, BATCH: rows * pp, "training.global_batch_size": -1})
                yield Group(rows, sequences // readers, batches, sample)


def _batches(rows: int, sequences: int, pp: int, batch: int | None) -> int:
    """Micro-batches of one run of a schedule: those of a local `batch`, else as many as divide the step, up to a limit.
    0: there are none."""
    found = [count for count in divisors(sequences // rows) if count <= (MICRO_BATCHES_PER_RANK * pp if pp > 1 else 1)]
    if batch is None:
        return found[-1]
    return batch // rows if sequences % batch == 0 and batch % rows == 0 and (pp > 1 or batch == rows) else 0


def variants(group: Group, gpus: int, fixed: Fixed) -> Iterator[Config]:
    """The valid ones, one per schedule; uncompiled where they do not run compiled."""
    pp = group.sample.parallelism.pipeline_parallel_degree
    total = group.sequences * gpus // _ranks_per_reader(group.sample)
    for name, stages in _schedules(fixed) if pp > 1 else (("1F1B", -1),):
        keys = {SCHEDULE: name, STAGES: stages}
        if not keeps(keys, fixed):
            continue
        found = changed(group.sample, {**keys, BATCH: group.rows * group.batches, "training.global_batch_size": total})
        if problems(found, gpus):
            found = changed(found, {COMPILE: False, "compile.components": Compile().components})
            if not group.sample.compile.enable or fixed.get(COMPILE) or problems(found, gpus):
                continue
        yield found


def _ranks_per_reader(config: Config) -> int:
    """Ranks that share one data-parallel rank's sequences."""
    parallelism = config.parallelism
    return (
        parallelism.pipeline_parallel_degree * parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    )


def _schedules(fixed: Fixed) -> Iterator[tuple[str, int]]:
    """Names with stages per rank; a fixed number is tried with all: the trainer's checks tell what goes together."""
    for name in SCHEDULES:
        tried = (-1,) if name in (*SINGLE_STAGE, *V_SHAPED) else VIRTUAL
        yield from ((name, stages) for stages in ((fixed[STAGES],) if STAGES in fixed else tried))


def divisors(number: int) -> Sequence[int]:
    """Ascending."""
    low = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]
