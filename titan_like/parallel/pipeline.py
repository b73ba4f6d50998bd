"""Pipeline parallelism: which layers are in which stage, and the schedule that runs them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from torch.profiler import record_function

from titan_like.config.composition import stage_count
from titan_like.config.pipeline_csv import read_schedule
from titan_like.config.schema import V_SHAPED, Config
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig, block_parameters


def stages_of_rank(config: Config, rank: int) -> list[int]:
    """Stage numbers on a rank of the `pp` axis, ascending."""
    parallelism = config.parallelism
    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if name.endswith(".csv"):
        return list(read_schedule(Path(name)).stages_of_rank[rank])
    if name in V_SHAPED:  # down and up again: the first and the last stage share rank 0
        return [rank, 2 * degree - 1 - rank]
    return list(range(rank, stage_count(config), degree))


def layer_ranges(model: ModelConfig, config: Config) -> list[range]:
    """The layers of each stage: those of pipeline_parallel_split, or balanced."""
    split = config.parallelism.pipeline_parallel_split
    if split:
        return [range(*bounds) for bounds in pairwise((0, *split, model.n_layers))]
    table = float(model.vocab_size * model.dim)
    return balanced_ranges(model.n_layers, stage_count(config), first=table, last=table, block=block_parameters(model))


def balanced_ranges(layers: int, stages: int, *, first: float, last: float, block: float) -> list[range]:
    """Contiguous ranges, one layer or more each, that make the costliest stage as cheap as possible.

    The first stage costs `first` and the last `last` on top of `block` per layer. The cost is the number of parameters:
    exact for memory, and for the time of the matrix products. Ties are broken towards equal stages.
    """
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last

    @cache
    def best(stage: int, remaining: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squared costs, layers per stage) of the stages from `stage` on."""
        options = [remaining] if stage == stages - 1 else range(1, remaining - (stages - 1 - stage) + 1)
        found = []
        for count in options:
            cost = extra[stage] + count * block
            rest = best(stage + 1, remaining - count) if stage < stages - 1 else (0.0, 0.0, ())
            found.append((max(cost, rest[0]), cost**2 + rest[1], (count, *rest[2])))
        return min(found)

    ends = list(accumulate(best(0, layers)[2]))
    return [range(*bounds) for bounds in pairwise((0, *ends))]


class Stage(PipelineStage):
    """Has its work named in a trace as a model without a pipeline: of torch's schedules, some name it, in two ways."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with record_function("backward"):
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with record_function("backward"):
            super().backward_weight_one_chunk(*args, **kwargs)


class Pipeline:
    """Runs this rank's stages over the micro-batches of one batch.

    Schedules are kept per shape of the batch. Stage boundaries are declared, not inferred: inference would run every
    stage once more at the first step and at each change between training and evaluation.
    """

    def __init__(self, parts: Sequence[Decoder], config: Config, mesh: Any, device: torch.device) -> None:
        self._parts, self._config, self._mesh, self._device = parts, config, mesh, device
        self._stages = stages_of_rank(config, mesh.axes["pp"].get_local_rank())
        self._count = stage_count(config)
        self._schedules: dict[tuple[int, int], Any] = {}

    @property
    def has_first(self) -> bool:
        return 0 in self._stages

    @property
    def has_last(self) -> bool:
        return self._count - 1 in self._stages

    def forward_backward(self, batch: Any, scale: Tensor) -> Tensor:
        """Gradients of scale x summed loss are added up; returns that loss on the rank of the last stage, else 0."""
        return self._run(batch, scale, "step")

    def forward(self, batch: Any) -> Tensor:
        """Summed loss on the rank of the last stage, else 0; call it under no_grad and between optimizer steps only."""
        schedule = self._schedule(batch)
        with _forward_only(schedule):
            return self._run(batch, None, "eval")

    def _run(self, batch: Any, scale: Tensor | None, method: str) -> Tensor:
        losses: list[Tensor] = []
        arguments = (batch.tokens,) if self.has_first else ()
        keywords: dict[str, Any] = {"positions": batch.positions}
        documents = batch.documents(self._config.parallelism.pipeline_parallel_microbatch_size)
        if documents is not None:
            keywords["documents"] = documents  # torch cuts the tensor in it, and repeats the numbers
        if self.has_last:
            keywords |= {"labels": batch.labels, "target": batch.labels, "losses": losses}
            if scale is not None:
                keywords["factors"] = scale.expand(len(batch.labels), 1)  # one per row: torch cuts all along dim 0
        getattr(self._schedule(batch), method)(*arguments, **keywords, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self._device)

    def _schedule(self, batch: Any) -> Any:
        rows, columns = batch.tokens.shape
        if (rows, columns) not in self._schedules:
            self._schedules[rows, columns] = self._build_schedule(rows, columns)
        return self._schedules[rows, columns]

    def _build_schedule(self, rows: int, columns: int) -> Any:
        parallelism = self._config.parallelism
        size, name = parallelism.pipeline_parallel_microbatch_size, parallelism.pipeline_parallel_schedule
        stages = [
            self._build_stage(part, number, size, columns)
            for part, number in zip(self._parts, self._stages, strict=True)
        ]
        is_file = name.endswith(".csv")
        kind = torch_schedules._PipelineScheduleRuntime if is_file else get_schedule_class(name)
        is_single = issubclass(kind, PipelineScheduleSingle)
        # scale_grads divides what has been accumulated so far by the number of micro-batches, again at each call.
        schedule = kind(
            stages[0] if is_single else stages,
            n_microbatches=rows // size,
            loss_fn=lambda loss, target: loss,  # the last stage returns it
            scale_grads=False,
        )
        if is_file:
            schedule._load_csv(name)
        if dist.get_backend() == "fake":
            _declare_static(schedule)
        return schedule

    def _build_stage(self, part: Decoder, number: int, size: int, columns: int) -> Stage:
        dtype = getattr(torch, self._config.training.mixed_precision_param)
        tp = self._config.parallelism.tensor_parallel_degree
        tokens = torch.empty(size, columns, dtype=torch.int64, device="meta")
        hidden = torch.empty(size, columns // tp, part.config.dim, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        return Stage(
            part,
            number,
            self._count,
            self._device,
            input_args=(tokens if number == 0 else hidden,),
            output_args=(loss if number == self._count - 1 else hidden,),
            group=self._mesh.axes["pp"].get_group(),
        )


def shard_slice(size: int, degree: int, rank: int) -> slice:
    """The part of a dim that DTensor's Shard gives to a rank: equal chunks, the last ones short or empty."""
    chunk = -(-size // degree)
    return slice(min(chunk * rank, size), min(chunk * (rank + 1), size))


_FORWARD_ACTIONS = {
    torch_schedules._ComputationType[name] for name in ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
}


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Leave only the forward actions in the plan: eval() of torch 2.13's V-shaped schedules trips over the others."""
    if not isinstance(schedule, PipelineScheduleMulti):
        yield
        return
    plan = schedule.pipeline_order_with_comms  # type: ignore[attr-defined]
    schedule.pipeline_order_with_comms = {  # type: ignore[attr-defined]
        rank: [
            part
            for action in actions
            for part in (action.sub_actions or (action,))
            if part.computation_type in _FORWARD_ACTIONS
        ]
        for rank, actions in plan.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = plan  # type: ignore[attr-defined]


def _declare_static(schedule: Any) -> None:
    """In a fake world no peer answers the vote on whether all stages have declared their boundaries; they have."""
    from torch.distributed.pipelining._utils import InferenceMode

    def warm_up(stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = warm_up
