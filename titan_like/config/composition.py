"""What composes with what. The config check and docs/composability.md are both made from the two tables here.

A combination is refused where it cannot be exact, or where torch 2.13 breaks on it; nothing is switched off in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_like.config.pipeline_csv import read_schedule
from titan_like.config.schema import SINGLE_STAGE, SPLIT_BACKWARD, Config


def splits_backward(config: Config) -> bool:
    """Whether the pipeline schedule computes the gradients of inputs and of weights at different times."""
    name = config.parallelism.pipeline_parallel_schedule
    if config.parallelism.pipeline_parallel_degree == 1:
        return False
    if not name.endswith(".csv"):
        return name in SPLIT_BACKWARD
    try:
        return read_schedule(Path(name)).splits_backward
    except (OSError, ValueError):  # checks.py says so
        return False


def stage_count(config: Config) -> int:
    """Pipeline stages of the whole model."""
    parallelism = config.parallelism
    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1:
        return 1
    if name.endswith(".csv"):
        return read_schedule(Path(name)).stages
    if parallelism.pipeline_parallel_virtual_stages != -1:
        return degree * parallelism.pipeline_parallel_virtual_stages
    if parallelism.pipeline_parallel_split:
        return len(parallelism.pipeline_parallel_split) + 1
    return degree if name in SINGLE_STAGE else 2 * degree


def tokens_of_loss(config: Config) -> int:
    """Tokens of a micro-batch whose logits one rank makes."""
    training, parallelism = config.training, config.parallelism
    is_pipelined = parallelism.pipeline_parallel_degree > 1
    rows = parallelism.pipeline_parallel_microbatch_size if is_pipelined else training.local_batch_size
    cuts = parallelism.context_parallel_degree
    if not parallelism.enable_loss_parallel:
        cuts *= parallelism.tensor_parallel_degree
    return rows * training.seq_len // cuts


FEATURES: dict[str, Callable[[Config], bool]] = {
    "replicate": lambda c: c.parallelism.data_parallel_replicate_degree > 1,
    "shard (FSDP2)": lambda c: c.parallelism.data_parallel_shard_degree > 1,
    "reshard always": lambda c: c.parallelism.fsdp_reshard_after_forward == "always",
    "tensor": lambda c: c.parallelism.tensor_parallel_degree > 1,
    "context": lambda c: c.parallelism.context_parallel_degree > 1,
    "context, alltoall": lambda c: (
        c.parallelism.context_parallel_degree > 1 and c.parallelism.context_parallel_rotate_method == "alltoall"
    ),
    "pipeline": lambda c: c.parallelism.pipeline_parallel_degree > 1 and not splits_backward(c),
    "pipeline, split backward": splits_backward,
    "accumulation": lambda c: c.training.global_batch_size > c.training.local_batch_size,
    "document masks": lambda c: c.data.reset_attention_mask,
    "tied embeddings": lambda c: bool(c.model.overrides.get("tie_embeddings")),
    "full recompute": lambda c: (
        c.activation_checkpoint.mode == "full"
        or (c.activation_checkpoint.mode == "selective" and c.activation_checkpoint.selective_ac_option != "op")
    ),
    "selective recompute (op)": lambda c: (
        c.activation_checkpoint.mode == "selective" and c.activation_checkpoint.selective_ac_option == "op"
    ),
    "compile": lambda c: c.compile.enable,
    "chunked loss": lambda c: c.training.loss_chunks > 1,
    "z-loss": lambda c: c.training.z_loss > 0,
    "async tensor": lambda c: c.parallelism.enable_async_tensor_parallel,
    "float8 tensorwise": lambda c: c.float8.enable and c.float8.recipe == "tensorwise",
    "float8 rowwise": lambda c: c.float8.enable and c.float8.recipe != "tensorwise",
    "float8 all-gather": lambda c: c.float8.enable and c.float8.enable_fsdp_float8_all_gather,
    "bfloat16": lambda c: c.training.mixed_precision_param == "bfloat16",
}


@dataclass(frozen=True)
class Rule:
    """A combination that is refused: all of `features` on (and, where given, all of `without` off)."""

    features: tuple[str, ...]
    reason: str
    without: tuple[str, ...] = ()


RULES = (
    Rule(
        ("float8 rowwise", "float8 all-gather"),
        "a weight that is gathered in float8 has one scale; set float8.recipe to tensorwise or turn "
        "float8.enable_fsdp_float8_all_gather off",
    ),
    Rule(
        ("pipeline, split backward", "compile"),
        "the compiled backward gives wrong weight gradients when it is run in two halves; turn compile.enable off or "
        "choose another parallelism.pipeline_parallel_schedule such as Interleaved1F1B",
    ),
    Rule(
        ("pipeline, split backward", "full recompute"),
        "each half of the backward would recompute every block again; set activation_checkpoint.mode to none or choose "
        "another parallelism.pipeline_parallel_schedule such as Interleaved1F1B",
    ),
    Rule(
        ("pipeline, split backward", "selective recompute (op)"),
        "the saved tensors are gone when the second half of the backward needs them; set activation_checkpoint.mode to "
        "none or choose another parallelism.pipeline_parallel_schedule such as Interleaved1F1B",
    ),
    Rule(
        ("pipeline, split backward", "reshard always"),
        "weights freed between the two halves of the backward give wrong gradients; set "
        "parallelism.fsdp_reshard_after_forward to default or never",
    ),
    Rule(
        ("tensor", "selective recompute (op)", "compile"),
        "torch cannot save a device mesh inside a compiled and recomputed block; set activation_checkpoint.mode to "
        "full, give activation_checkpoint.selective_ac_option a number of layers, or turn compile.enable off",
    ),
    Rule(
        ("context, alltoall", "document masks"),
        "document masks gather keys and values instead of rotating them; set "
        "parallelism.context_parallel_rotate_method to allgather",
    ),
    Rule(
        ("async tensor",),
        "it works inside compiled blocks of tensor-parallel ranks only; set compile.enable and "
        "parallelism.tensor_parallel_degree, or turn parallelism.enable_async_tensor_parallel off",
        without=("tensor", "compile"),
    ),
)


def features_of(config: Config) -> set[str]:
    """The features that `config` uses."""
    return {name for name, is_on in FEATURES.items() if is_on(config)}


def refusals(config: Config) -> list[str]:
    """One sentence per rule that `config` breaks."""
    used = features_of(config)
    return [
        f"{' with '.join(rule.features)} is refused: {rule.reason}"
        for rule in RULES
        if used.issuperset(rule.features) and (not rule.without or not used.issuperset(rule.without))
    ]
