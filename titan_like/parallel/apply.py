"""From a model shape to this rank's part of a parallel model: the one place that knows the order of wrapping."""

import logging

import torch

from titan_like.config.schema import Config
from titan_like.loss import LinearCrossEntropy, Vocabulary, chunk_loss
from titan_like.models.decoder import Decoder
from titan_like.models.flavors import ModelConfig
from titan_like.parallel.compile import compile_blocks
from titan_like.parallel.context import apply_context_parallel, local_index
from titan_like.parallel.fsdp import apply_data_parallel
from titan_like.parallel.init import init_weights
from titan_like.parallel.mesh import Mesh
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.pipeline import Pipeline, layer_ranges, shard_slice, stages_of_rank
from titan_like.parallel.recompute import recompute_blocks, recompute_operations
from titan_like.parallel.tensor import apply_tensor_parallel, enable_async_tensor_parallel
from titan_like.quantize.float8 import convert
from titan_like.quantize.layers import float8_plan

logger = logging.getLogger(__name__)


def build_model(model_config: ModelConfig, config: Config, mesh: Mesh, device: torch.device) -> ParallelModel:
    """Build on meta, wrap, materialise, initialise. Parameters are fp32, whatever the compute dtype."""
    model = wrap_model(model_config, config, mesh, device)
    for part in model.parts:
        part.to_empty(device=device)
        part.tie_weights()
        init_weights(part.named_parameters(), model_config, config.training.seed)
    return model


def wrap_model(model_config: ModelConfig, config: Config, mesh: Mesh, device: torch.device) -> ParallelModel:
    """The same without any memory: every parameter is on meta."""
    parallelism, degree = config.parallelism, mesh.degree("cp")
    float8 = float8_plan(model_config, config) if config.float8.enable else None
    for line in float8.describe() if float8 else ():
        logger.info("float8 (%s%s): %s", config.float8.recipe, ", emulated" * config.float8.emulate, line)
    if config.float8.enable_fsdp_float8_all_gather and mesh.sharding["fsdp"].size() == 1:
        logger.info("float8.enable_fsdp_float8_all_gather has no effect: no weight is sharded, so none is gathered")
    ranges = layer_ranges(model_config, config)
    stages = stages_of_rank(config, mesh.axes["pp"].get_local_rank())
    parts = []
    for stage in stages:
        with torch.device("meta"):
            part = Decoder(model_config)
        part.keep_stage(ranges[stage], first=stage == 0, last=stage == len(ranges) - 1)
        if float8 is not None:  # before all wrapping
            convert(part, float8.converted, config.float8)
        wrap_part(part, config, mesh)
        parts.append(part)
        logger.info("stage %d of %d: layers %d to %d", stage, len(ranges), ranges[stage][0], ranges[stage][-1])
    return ParallelModel(
        config=model_config,
        mesh=mesh,
        parts=parts,
        pipeline=Pipeline(parts, config, mesh, device) if mesh.degree("pp") > 1 else None,
        sequence_index=None
        if degree == 1
        else local_index(
            config.training.seq_len,
            degree,
            mesh.axes["cp"].get_local_rank(),
            load_balance=parallelism.context_parallel_load_balance,
        ).to(device),
        reduces_once=parallelism.fsdp_reshard_after_forward == "never",
        precomputes_scales=config.float8.precompute_float8_dynamic_scale_for_fsdp,
    )


def wrap_part(part: Decoder, config: Config, mesh: Mesh) -> None:
    """The order: tensor -> context -> selective recompute -> compile -> recompute of blocks -> data parallel.

    Recompute of whole blocks lies outside the compiled block, which works with tensor parallelism too; recompute per
    operation lies inside, where it sees the operations.
    """
    parallelism, recompute = config.parallelism, config.activation_checkpoint
    if part.output is not None:
        part.output.loss = build_loss(part.config, config, mesh)
    if mesh.degree("tp") > 1:
        apply_tensor_parallel(
            part,
            mesh.sharding["tp"],
            loss_parallel=parallelism.enable_loss_parallel,
            float8_gather=config.float8.enable and config.float8.recipe == "tensorwise",
        )
        if parallelism.enable_async_tensor_parallel:
            enable_async_tensor_parallel(mesh.sharding["tp"])
    if mesh.degree("cp") > 1:
        apply_context_parallel(
            part,
            mesh.axes["cp"],
            config.training.seq_len,
            documents=config.data.reset_attention_mask,
            load_balance=parallelism.context_parallel_load_balance,
            rotate_method=parallelism.context_parallel_rotate_method,
        )
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        recompute_operations(part)
    if config.compile.enable and "blocks" in config.compile.components:
        compile_blocks(part)
    if recompute.mode == "full":
        recompute_blocks(part, every=1)
    elif recompute.mode == "selective" and recompute.selective_ac_option != "op":
        recompute_blocks(part, every=recompute.selective_ac_option)
    reshard = parallelism.fsdp_reshard_after_forward
    apply_data_parallel(
        part,
        mesh,
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        reshard_after_forward=reshard == "always" or (reshard == "default" and mesh.degree("pp") == 1),
        always=config.float8.enable_fsdp_float8_all_gather,
    )


def build_loss(model_config: ModelConfig, config: Config, mesh: Mesh) -> LinearCrossEntropy:
    """The head's loss, over this rank's part of the vocabulary where it has one."""
    part = None
    if mesh.degree("tp") > 1 and config.parallelism.enable_loss_parallel:
        tp = mesh.sharding["tp"]
        rows = shard_slice(model_config.vocab_size, tp.size(), tp.get_local_rank())
        part = Vocabulary(rows.start, tp.get_group().group_name)
    is_compiled = config.compile.enable and "loss" in config.compile.components
    return LinearCrossEntropy(
        chunks=config.training.chunks_of,
        z_loss=config.training.z_loss,
        part=part,
        chunk_loss=torch.compile(chunk_loss) if is_compiled else chunk_loss,
    )
