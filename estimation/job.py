"""What the formula needs to know of a run: plain numbers, from a checked config or from a published row."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from estimation.float8 import Float8, float8_of
from estimation.profiles import TITAN_LIKE, Profile
from estimation.program import Shape
from estimation.schedules import Action, Schedule, actions_of, schedule_of
from titan_like.config.composition import stage_count, tokens_of_loss
from titan_like.config.schema import Config, Optimizer
from titan_like.models.flavors import ModelConfig, resolve

NUMBER = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Job:
    """A composition on a number of ranks.

    Attributes:
        rows: sequences that pass through a stage together.
        batch_rows: sequences of a loaded micro-batch of a data-parallel rank; pipelining splits it into `rows`.
        accumulation: loaded micro-batches of an optimizer step.
        stages: the layers of each pipeline stage.
        actions: what each pipeline rank runs for one loaded micro-batch.
        schedule: which of torch's loops runs them: looped is that of all schedules but GPipe and 1F1B.
        recompute: none, full, op, or n: whole blocks, every n-th.
        number, reduce_number: bytes of a number in compute, and in the reduction of gradients.
        reshard: gathered weights are freed after the forward.
        reduces_once: gradients are reduced with the last micro-batch of a step only.
        wrapped: parameters are FSDP2's, gathered or cast for compute.
        rotate, balanced: of context parallelism, see Shape.
        updates_together: the optimizer makes a number for each one of the rank's part at once.
        only_first_step: peaks are asked of the first step alone.
    """

    model: ModelConfig
    rows: int
    batch_rows: int
    seq_len: int
    accumulation: int
    replicate: int
    fsdp: int
    cp: int
    tp: int
    stages: tuple[range, ...]
    actions: tuple[tuple[Action, ...], ...]
    schedule: Schedule = "none"
    recompute: Literal["none", "full", "op"] | int = "none"
    number: int = 2
    reduce_number: int = 4
    reshard: bool = True
    reduces_once: bool = False
    wrapped: bool = True
    compiled: bool = False
    documents: bool = False
    rotate: str = "allgather"
    balanced: bool = True
    float8: Float8 | None = None
    optimizer: str = "adamw"
    updates_together: bool = False
    only_first_step: bool = False
    profile: Profile = TITAN_LIKE

    @cached_property
    def pp(self) -> int:
        return len(self.actions)

    @property
    def world_size(self) -> int:
        return self.pp * self.replicate * self.fsdp * self.tp

    @property
    def communicators(self) -> int:
        """NCCL communicators of a rank: one per axis of the mesh with more than one rank, and that of the world."""
        return 1 + sum(degree > 1 for degree in (self.pp, self.replicate, self.fsdp, self.cp, self.tp))

    @cached_property
    def shape(self) -> Shape:
        return Shape(
            self.model,
            self.rows,
            self.seq_len,
            self.tp,
            self.cp,
            self.number,
            self.documents,
            self.compiled,
            self.rotate,
            self.balanced,
            self.profile,
        )

    @property
    def input_bytes(self) -> int:
        """int64 tokens, labels and positions (document starts too) of all micro-batches of a step, whole and cut."""
        whole = self.accumulation * self.batch_rows * self.seq_len * 8 * (3 + self.documents)
        return whole if self.cp == 1 else whole + whole // self.cp

    def mode_of(self, layer: int) -> Literal["none", "full", "op"]:
        """How the block of a layer is recomputed."""
        if isinstance(self.recompute, int):
            return "full" if (layer + 1) % self.recompute == 0 else "none"
        return self.recompute

    def state_sizes(self, numbers: int) -> tuple[int, ...]:
        """Bytes of the optimizer's tensors for a parameter: an fp32 step count and two moments; SGD has none."""
        if self.optimizer != "adamw":
            return ()
        moment = {"fp32": 4, "bf16": 2, "8bit": 1}[self.profile.adam] * numbers
        moment += numbers // 64 if self.profile.adam == "8bit" else 0  # an fp32 scale for each 256 numbers
        return 4, moment, moment

    def products_of(self, layer: int) -> frozenset[str]:
        """The products of its block in float8."""
        return self.float8.layers[layer] if self.float8 else frozenset()


def job_of(config: Config, world_size: int, profile: Profile = TITAN_LIKE) -> Job:
    """The job of a config that titan_like.launch.check_settings has passed for `world_size`."""
    parallelism, training, recompute = config.parallelism, config.training, config.activation_checkpoint
    pp, tp, cp = (
        parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    )  # fmt: skip
    replicate = parallelism.data_parallel_replicate_degree
    fsdp = world_size // (pp * tp * replicate)
    readers = replicate * fsdp // cp
    number = NUMBER[training.mixed_precision_param]
    reshard = parallelism.fsdp_reshard_after_forward
    compiled_loss = config.compile.enable and "loss" in config.compile.components
    option = recompute.selective_ac_option
    changes: dict[str, Any] = {"loss_parallel": parallelism.enable_loss_parallel}
    if compiled_loss:
        changes["loss"] = "linear compiled" if profile.is_linear else "compiled"
    model = resolve(config.model.name, config.model.flavor, config.model.overrides)
    rows = parallelism.pipeline_parallel_microbatch_size if pp > 1 else training.local_batch_size
    if profile.is_linear:
        changes["loss_chunks"] = training.chunks_of(tokens_of_loss(config), model.dim)
    return Job(
        model=model,
        rows=rows,
        batch_rows=training.local_batch_size,
        seq_len=training.seq_len,
        accumulation=max(1, training.global_batch_size // (training.local_batch_size * readers)),
        replicate=replicate,
        fsdp=fsdp,
        cp=cp,
        tp=tp,
        stages=stage_ranges(config),
        actions=actions_of(config),
        schedule=schedule_of(config),
        recompute=recompute.mode if recompute.mode in ("none", "full") else option,
        number=number,
        reduce_number=NUMBER[training.mixed_precision_reduce],
        reshard=reshard == "always" or (reshard == "default" and pp == 1),
        reduces_once=reshard == "never",
        wrapped=replicate * fsdp > 1 or number == 2 or config.float8.enable_fsdp_float8_all_gather,
        compiled=config.compile.enable and "blocks" in config.compile.components,
        documents=config.data.reset_attention_mask,
        rotate=parallelism.context_parallel_rotate_method,
        balanced=parallelism.context_parallel_load_balance,
        float8=float8_of(model, config),
        optimizer=config.optimizer.name,
        updates_together=_updates_together(config.optimizer),
        profile=Profile(**{**profile.__dict__, **changes}),
    )


def _updates_together(optimizer: Optimizer) -> bool:
    """torch's foreach kernels: AdamW divides by roots of all second moments, SGD adds the decay to all gradients."""
    if optimizer.name == "adamw":
        return optimizer.implementation == "foreach"
    return optimizer.implementation in ("auto", "foreach") and optimizer.weight_decay > 0


_RANGES: dict[tuple[object, ...], tuple[range, ...]] = {}


def stage_ranges(config: Config) -> tuple[range, ...]:
    """The layers of every stage, as titan_like.parallel.pipeline cuts them."""
    model = resolve(config.model.name, config.model.flavor, config.model.overrides)
    count, split = stage_count(config), config.parallelism.pipeline_parallel_split
    if split:
        return tuple(range(*bounds) for bounds in pairwise((0, *split, model.n_layers)))
    if count == 1:
        return (range(model.n_layers),)
    key = (model, count)
    if key not in _RANGES:
        from titan_like.parallel.pipeline import layer_ranges  # imports torch

        _RANGES[key] = tuple(layer_ranges(model, config))
    return _RANGES[key]
