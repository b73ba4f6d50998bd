"""Tensor parallelism with sequence parallelism: a plan per block as a dict literal, Megatron's column/row scheme
(arXiv:1909.08053, arXiv:2205.05198).

Between the matrices of a block each rank holds all positions and a part of the heads or of the hidden units; elsewhere
it holds a part of the sequence.
"""

from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titan_like.models.decoder import Decoder

BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
    ),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),  # (B, S, N, H): cut by heads
    "attention.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}


def model_plan(*, loss_parallel: bool) -> dict[str, Any]:
    """Embedding, last norm and head; both tables are cut by vocabulary rows.

    With `loss_parallel` the head returns this rank's columns of the logits, (B, S, V / tp) plain tensors (the last rank
    may have fewer), for `vocab_parallel_cross_entropy`; otherwise it gathers them.
    """
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1) if loss_parallel else Replicate()),
    }


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Cut the parameters of a stage over the `tp` axis, and make its modules communicate."""
    parallelize_module(model, mesh, _present(model, model_plan(loss_parallel=loss_parallel)))
    for block in model.layers.values():
        parallelize_module(block, mesh, _present(block, BLOCK_PLAN))
    model.tie_weights()  # parallelize_module gives the head a table of its own
    if model.tok_embeddings is not None:
        # The first block's input would otherwise be a pending collective, which a compiled block cannot take
        # (torch 2.13: "'Tensor' object has no attribute '_local_tensor'" in backward).
        model.tok_embeddings.register_forward_hook(_wait)


def _present(module: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan whose modules this model has."""
    names = {name for name, child in module.named_modules() if child is not None}
    return {name: style for name, style in plan.items() if name in names}


def _wait(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return funcol.wait_tensor(output) if isinstance(output, funcol.AsyncCollectiveTensor) else output


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let inductor decompose matrix products to overlap them with the collectives. GPU only; needs compiled blocks."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True  # private; checked to exist on torch 2.13
    enable_symm_mem_for_group(mesh.get_group().group_name)
