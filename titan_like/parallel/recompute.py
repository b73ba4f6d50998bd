"""Activation recompute: whole blocks, every n-th block, or all but a list of operations (arXiv:1604.06174)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives
import torch.nn.attention.varlen
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_like.models.decoder import Decoder
from titan_like.parallel import context  # noqa: F401  registers titan_like::ring_attention

MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}  # the second: float8
# Results that are kept, being dear to compute or to communicate; of the matrix products every second one is kept too.
SAVED = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.titan_like.ring_attention.default,
    torch.ops.titan_like.document_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    # The scales of float8, small results of a look at whole tensors (and, with tensor parallelism, of a message).
    torch.ops.aten.max.default,
    torch.ops.aten.amax.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def recompute_blocks(model: Decoder, every: int) -> None:
    """Keep only the inputs of each `every`-th block; applied outside a compiled block."""
    for name, block in model.layers.items():
        if (int(name) + 1) % every == 0:
            _wrap(block, None)


def recompute_operations(model: Decoder) -> None:
    """Recompute each block but for the operations in SAVED; applied inside a compiled block, where it sees them."""
    for block in model.layers.values():
        _wrap(block, _selective_contexts)


def _wrap(block: nn.Module, context_fn: Callable[[], Any] | None) -> None:
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    # No randomness enters a block, so there is no random state to keep. Parameter names stay as they are: the forward
    # is wrapped, not the module.
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _selective_contexts() -> Any:
    products = {False: 0, True: 0}  # counted in the forward and again in the recomputation

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in MATRIX_PRODUCTS:
            products[ctx.is_recompute] += 1
            keep = products[ctx.is_recompute] % 2 == 0
        else:
            keep = operation in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
