"""Tensor parallelism with sequence parallelism: a plan per block as a dict literal, Megatron's column/row scheme
(arXiv:1909.08053, arXiv:2205.05198).

Between the matrices of a block each rank holds all positions and a part of the heads or of the hidden units; elsewhere
it holds a part of the sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titan_like.models.decoder import Decoder
from titan_like.quantize.float8 import gather_in_float8

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


class TableRows(ParallelStyle):
    """Cuts a table by rows of the vocabulary; the lookup and the loss below do the communication."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(name: str, table: nn.Module, mesh: DeviceMesh) -> None:
            table.weight = nn.Parameter(distribute_tensor(cast(Tensor, table.weight), mesh, [Shard(0)]))

        return distribute_module(module, device_mesh, cut)


MODEL_PLAN = {
    "tok_embeddings": TableRows(),
    "norm": SequenceParallel(),
    "output": TableRows(),
}

Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # as loss.LinearCrossEntropy


def look_up(embedding: nn.Embedding, tokens: Tensor) -> Tensor:  # (B, S) int64 -> (B, S / tp, D)
    """Every rank looks up the tokens of its rows; the sum over ranks is cut along the sequence.

    DTensor's own lookup makes the gradient of the whole vocabulary on every rank.
    """
    table = cast(DTensor, embedding.weight)
    mesh, rows = table.device_mesh, table.to_local()
    own = tokens - mesh.get_local_rank() * -(-table.shape[0] // mesh.size())
    is_elsewhere = (own < 0) | (own >= rows.shape[0])
    part = F.embedding(own.masked_fill(is_elsewhere, 0), rows).masked_fill_(is_elsewhere[..., None], 0)
    summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])
    # The first block's input would otherwise be a pending collective, which a compiled block cannot take
    # (torch 2.13: "'Tensor' object has no attribute '_local_tensor'" in backward).
    local = summed.to_local()
    return funcol.wait_tensor(local) if isinstance(local, funcol.AsyncCollectiveTensor) else local


def loss_over_vocabulary(loss: Loss, hidden: DTensor, table: DTensor, labels: Tensor, factors: Tensor | None) -> Tensor:
    """Every rank gathers the hidden states of all tokens and has the logits of its rows of the table."""
    everywhere = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return loss(everywhere, table.to_local(), labels, factors)


def loss_over_sequence(loss: Loss, hidden: DTensor, table: DTensor, labels: Tensor, factors: Tensor | None) -> Tensor:
    """Every rank gathers the whole table and has all logits of its part of the sequence."""
    mesh = hidden.device_mesh
    factors = labels.new_ones((), dtype=torch.float64) if factors is None else factors
    own = [x.chunk(mesh.size(), 1)[mesh.get_local_rank()] for x in (labels, factors.expand_as(labels))]
    whole = table.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    part = DTensor.from_local(loss(hidden.to_local(), whole, *own), mesh, [Partial()], run_check=False)
    # A copy, since a split backward of torch's pipelines detaches in place what a stage returns, which must be no view.
    return part.redistribute(placements=[Replicate()]).to_local().clone()


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, *, loss_parallel: bool, float8_gather: bool = False
) -> None:
    """Cut the parameters of a stage over the `tp` axis, and make its modules communicate; with `float8_gather` in
    float8 where all that read a message are float8 layers."""
    parallelize_module(model, mesh, _present(model, MODEL_PLAN))
    for block in model.layers.values():
        plan = _present(block, BLOCK_PLAN)
        parallelize_module(block, mesh, gather_in_float8(block, plan) if float8_gather else plan)
    if model.output is not None and model.output.loss is not None:
        model.output.loss = partial(loss_over_vocabulary if loss_parallel else loss_over_sequence, model.output.loss)
    model.tie_weights()  # parallelize_module gives the head a table of its own
    if model.tok_embeddings is not None:
        model.tok_embeddings.forward = partial(look_up, model.tok_embeddings)  # type: ignore[method-assign]


def _present(module: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan whose modules this model has."""
    names = {name for name, child in module.named_modules() if child is not None}
    return {name: style for name, style in plan.items() if name in names}


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let inductor decompose matrix products to overlap them with the collectives. GPU only; needs compiled blocks."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True  # private; checked to exist on torch 2.13
    enable_symm_mem_for_group(mesh.get_group().group_name)
