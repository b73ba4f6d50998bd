"""Data parallelism: FSDP2, HSDP and plain replication, all through `fully_shard`."""

import warnings
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_like.models.decoder import Decoder
from titan_like.parallel.mesh import Mesh


def apply_data_parallel(
    model: Decoder,
    mesh: Mesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    always: bool = False,
) -> None:
    """Shard each block, the embedding and the head over `fsdp`, replicate over `dp_replicate`.

    A replica is an HSDP mesh with one shard. One rank in fp32 needs no wrapping; one rank in bf16 does, since the
    wrapper keeps the fp32 parameters and casts them for compute, or to float8 (`always`).
    """
    replicate, shard = mesh.sharding["dp_replicate"], mesh.sharding["fsdp"]
    if replicate.size() * shard.size() == 1 and param_dtype == torch.float32 and not always:
        return
    # Inputs are not cast: they are token ids and fp32 rotary tables, which must stay as they are.
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    data_parallel = mesh.sharding["dp_replicate", "fsdp"] if replicate.size() > 1 else shard
    shard_over = partial(fully_shard, mesh=data_parallel, mp_policy=policy)
    for block in model.layers.values():
        shard_over(block, reshard_after_forward=reshard_after_forward)
    embedding, head = model.tok_embeddings, [m for m in (model.norm, model.output) if m is not None]
    is_tied = embedding is not None and model.output is not None and embedding.weight is model.output.weight
    if not is_tied:  # a tied table belongs to the root, which both of its uses lie under
        if embedding is not None:
            shard_over(embedding, reshard_after_forward=reshard_after_forward)
        if head:  # the backward begins with these: gathering them again would only cost
            shard_over(head, reshard_after_forward=False)
    shard_over(model)
    _sum_gradients(model)
    # Nothing here changes a module's output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _sum_gradients(model: Decoder) -> None:
    """Add gradients up instead of averaging: step.py has already divided by the global number of labels.

    Both setters are needed on gloo, and neither is recursive: the divide factor alone asks for PREMUL_SUM, which gloo
    has not; the forced sum alone still divides by the number of ranks.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
