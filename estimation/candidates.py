"""All compositions of a model on a number of GPUs that the trainer would run: mesh, schedule, micro-batch, recompute.

Valid is what the trainer's own checks pass; nothing of them is repeated here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_like.config import Config
from titan_like.config.checks import cross_checks
from titan_like.config.schema import SCHEDULES, SINGLE_STAGE, V_SHAPED
from titan_like.launch import check_settings

VIRTUAL = (2, 4)  # stages per rank that are tried
MICRO_BATCHES_PER_RANK = 4  # of the pipeline, in one run of the schedule; the rest of a batch is accumulated
RECOMPUTE: tuple[tuple[str, str | int], ...] = (("none", "op"), ("selective", "op"), ("selective", 2), ("full", "op"))


def changed(config: Config, keys: dict[str, Any]) -> Config:
    """`config` with other values ("section.key"); they are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    return config.model_copy(update=update)


def problems(config: Config, world_size: int) -> list[str]:
    """What the trainer would refuse before it opens any data; its folders are not looked at."""
    unwritten = changed(config, {"comm.mode": "fake", "comm.fake_rank": 0})  # in this mode it writes nothing
    return [*cross_checks(unwritten), *check_settings(unwritten, world_size)]


def meshes(base: Config, gpus: int) -> Iterator[Config]:
    """Valid degrees of every axis, with one sequence per step and rank."""
    for pp in divisors(gpus):
        for tp in divisors(gpus // pp):
            for cp in divisors(gpus // (pp * tp)):
                for replicate in divisors(gpus // (pp * tp * cp)):
                    mesh = changed(
                        base,
                        {
                            "parallelism.pipeline_parallel_degree": pp, "parallelism.tensor_parallel_degree": tp,
                            "parallelism.context_parallel_degree": cp,
                            "parallelism.data_parallel_replicate_degree": replicate,
                            "parallelism.data_parallel_shard_degree": -1,
                        },
                    )  # fmt: skip
                    trial = changed(mesh, {"training.local_batch_size": pp, "training.global_batch_size": -1})
                    if not problems(trial, gpus):
                        yield mesh


@dataclass(frozen=True)
class Group:
    """Compositions that compute the same, and differ in when.

    Attributes:
        rows: sequences that are computed together; sequences: of an optimizer step, of one data-parallel rank.
        sample: one of them: the smallest batch that fills the pipeline. It need not be valid.
    """

    rows: int
    sequences: int
    sample: Config

    @property
    def most_batches(self) -> int:
        """Micro-batches of one run of a schedule: as many as divide the step, up to a limit."""
        limit = MICRO_BATCHES_PER_RANK * self.sample.parallelism.pipeline_parallel_degree
        return max(count for count in divisors(self.sequences // self.rows) if count <= limit)


def groups(mesh: Config, gpus: int, sequences: int) -> Iterator[Group]:
    """All micro-batch sizes and recompute modes of a mesh, for optimizer steps of `sequences` sequences."""
    pp, readers = mesh.parallelism.pipeline_parallel_degree, gpus // _ranks_per_reader(mesh)
    if sequences % readers:
        return
    for rows in divisors(sequences // readers):
        for mode, option in RECOMPUTE:
            keys = {
                "activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": option,
                "training.local_batch_size": rows * pp, "training.global_batch_size": -1,
                "parallelism.pipeline_parallel_microbatch_size": rows if pp > 1 else 1,
            }  # fmt: skip
            yield Group(rows, sequences // readers, changed(mesh, keys))


def variants(group: Group, gpus: int) -> Iterator[Config]:
    """The valid ones, one per schedule; uncompiled where they do not run compiled."""
    pp = group.sample.parallelism.pipeline_parallel_degree
    total = group.sequences * gpus // _ranks_per_reader(group.sample)
    for name, virtual in _schedules() if pp > 1 else (("1F1B", -1),):
        keys = {
            "training.local_batch_size": group.rows * (group.most_batches if pp > 1 else 1),
            "training.global_batch_size": total,
            "parallelism.pipeline_parallel_schedule": name,
            "parallelism.pipeline_parallel_virtual_stages": virtual,
        }
        found = changed(group.sample, keys)
        if problems(found, gpus):
            found = changed(found, {"compile.enable": False})
            if not group.sample.compile.enable or problems(found, gpus):
                continue
        yield found


def _ranks_per_reader(config: Config) -> int:
    """Ranks that share one data-parallel rank's sequences."""
    parallelism = config.parallelism
    return (
        parallelism.pipeline_parallel_degree * parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    )


def _schedules() -> Iterator[tuple[str, int]]:
    for name in SCHEDULES:
        for virtual in (-1,) if name in (*SINGLE_STAGE, *V_SHAPED) else VIRTUAL:
            yield name, virtual


def divisors(number: int) -> Sequence[int]:
    """Ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]
