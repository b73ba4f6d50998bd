"""How a trainer computes and communicates, where memory does not depend on it."""

from dataclasses import dataclass
from typing import Literal

from estimation.time.speed import Attention
from titan_like.config.schema import Config


@dataclass(frozen=True)
class Way:
    """The defaults are titan_like's.

    Attributes:
        async_tensor: tensor-parallel communication overlaps with matrix products, chunk by chunk.
        rotate: how ring attention moves keys and values; load_balance: each rank has an early and a late part.
        float8: matrix products (not the head's) in float8, each tensor scaled by its largest number.
        float8_gather: weights are cast before they are gathered; float8_again: laid out a second time by the backward.
        attention: the kernel.
        update: the optimizer in one kernel, or in kernels that do one operation each on many tensors.
    """

    async_tensor: bool = False
    rotate: Literal["allgather", "alltoall"] = "allgather"
    load_balance: bool = True
    float8: bool = False
    float8_gather: bool = False
    float8_again: bool = False
    attention: Attention = "flash"
    update: Literal["fused", "foreach"] = "fused"


def way_of(config: Config) -> Way:
    parallelism, update = config.parallelism, config.optimizer.implementation
    return Way(
        parallelism.enable_async_tensor_parallel,
        parallelism.context_parallel_rotate_method,
        parallelism.context_parallel_load_balance,
        config.float8.enable,
        config.float8.enable and config.float8.enable_fsdp_float8_all_gather,
        update="fused" if update in ("auto", "fused") else "foreach",
    )


def notes_on(config: Config) -> list[str]:
    """What the prediction of a config's step time leaves out, beyond what it always does."""
    if not config.float8.enable or config.float8.recipe == "tensorwise":
        return []
    return [
        f"float8.recipe {config.float8.recipe}: predicted as tensorwise; published runs of it are 15 to 40 % slower"
    ]
