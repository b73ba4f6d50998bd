"""`[comm] mode = "fake"`: one process builds the program of one rank of a world of any size and runs one step of it.

Collectives return at once and tensors have shapes but no memory, so the values mean nothing; that every stage, shard
and message fits the next is what this shows. The blocks run uncompiled.
"""

import logging
import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode  # private; checked on torch 2.13
from torch.testing._internal.distributed.fake_pg import FakeStore  # private; checked on torch 2.13

from titan_like.auto import with_chosen_recompute
from titan_like.config import Config
from titan_like.config.composition import stage_count
from titan_like.data.loader import Batch
from titan_like.models.flavors import ModelConfig, block_parameters, parameter_count, resolve
from titan_like.observe.logs import setup_logging
from titan_like.optim.optimizer import build_optimizer
from titan_like.parallel.apply import wrap_model
from titan_like.parallel.mesh import AXES, Mesh, build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.pipeline import layer_ranges, stages_of_rank
from titan_like.step import apply_gradients, compute_gradients

logger = logging.getLogger(__name__)


def run_fake(config: Config, world_size: int) -> None:
    """Build and run rank comm.fake_rank of `world_size`, and say what it holds."""
    started = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=config.comm.fake_rank, world_size=world_size)
    setup_logging(0)
    config = with_chosen_recompute(config, torch.device("cpu"))
    eager = config.model_copy(update={"compile": config.compile.model_copy(update={"enable": False})})
    mesh = build_mesh("cpu", config.parallelism)
    shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
    describe_world(shape, config, mesh)
    model = wrap_model(shape, eager, mesh, torch.device("cpu"))
    describe_rank(model)
    batches = run_step(model, eager)
    logger.info(
        "one step of %d micro-batches of %d x %d tokens ran through; %.0f s, %.1f GiB of host memory",
        batches, config.training.local_batch_size, config.training.seq_len, time.perf_counter() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )  # fmt: skip
    dist.destroy_process_group()


def run_step(model: ParallelModel, config: Config) -> int:
    """One training step and optimizer step on fake tensors; returns the number of micro-batches.

    The model was wrapped on meta outside of fake mode: sharding a tensor-parallel model inside it fails.
    """
    # Fused and foreach kernels of DTensors are shape-checked slowly; the plain loop updates the same state.
    plain = config.optimizer.model_copy(update={"implementation": "for-loop"})
    with FakeTensorMode(allow_non_fake_inputs=True):
        return train(model, config.model_copy(update={"optimizer": plain}), steps=1)


def train(model: ParallelModel, config: Config, steps: int, on_start: Callable[[], None] = lambda: None) -> int:
    """Allocate the weights of a wrapped model and train on zeros; returns the number of micro-batches of a step.

    What a rank of a real run does, but for values: also called by the estimator, on fake and on real tensors.

    Args:
        on_start: called when the weights are there and the first step begins.
    """
    training = config.training
    readers = model.mesh.degree("dp_replicate", "dp_shard")
    micro_batches = max(1, training.global_batch_size // (training.local_batch_size * readers))
    for part in model.parts:
        part.to_empty(device="cpu")
        part.tie_weights()
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    on_start()
    for _ in range(steps):
        batches = [zeros(config) for _ in range(micro_batches)]
        compute_gradients(model, batches, training.max_norm)
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {', '.join(missing)}")
        apply_gradients(model, optimizer)  # whatever the norm is: fake tensors have no values
    return micro_batches


def zeros(config: Config) -> Batch:
    """A micro-batch in which each row is one document."""
    rows, columns = config.training.local_batch_size, config.training.seq_len
    tokens, labels, positions = (torch.zeros(rows, columns, dtype=torch.int64) for _ in range(3))
    starts = torch.zeros_like(tokens) if config.data.reset_attention_mask else None
    return Batch(tokens, labels, positions, starts, lengths=((columns,),) * rows)


def describe_world(shape: ModelConfig, config: Config, mesh: Mesh) -> None:
    """The mesh, and the stages of every pipeline rank."""
    logger.info("mesh of %s ranks: %s", f"{mesh.size():,}", " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES))
    logger.info("model %s %s: %s parameters", config.model.name, config.model.flavor, f"{parameter_count(shape):,}")
    if mesh.degree("pp") == 1:
        return
    ranges, table = layer_ranges(shape, config), shape.vocab_size * shape.dim
    for rank in range(mesh.degree("pp")):
        for stage in stages_of_rank(config, rank):
            layers, is_last = ranges[stage], stage == stage_count(config) - 1
            parameters = len(layers) * block_parameters(shape) + table * ((stage == 0) + is_last) + shape.dim * is_last
            logger.info(
                "pp rank %d, stage %d: layers %d to %d%s%s, %s parameters",
                rank, stage, layers[0], layers[-1], ", embedding" * (stage == 0), ", norm and head" * is_last,
                f"{parameters:,}",
            )  # fmt: skip


def describe_rank(model: ParallelModel) -> None:
    """This rank's coordinate, its parameters, and how those of the first block and the tables are placed."""
    coordinate = model.mesh.axes.get_coordinate()
    assert coordinate is not None
    parameters = dict(model.named_parameters())
    local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters.values())
    logger.info(
        "rank %d at %s: %s parameters",
        dist.get_rank(), ", ".join(f"{a} {c}" for a, c in zip(AXES, coordinate, strict=True)), f"{local:,}",
    )  # fmt: skip
    first = next(iter(model.parts[0].layers))
    for name, parameter in parameters.items():
        if name.startswith(f"layers.{first}.") or not name.startswith("layers."):
            placed = getattr(parameter, "placements", "whole")
            part = tuple(parameter.to_local().shape) if hasattr(parameter, "to_local") else tuple(parameter.shape)
            logger.info("  %-42s %-16s of %-16s %s", name, part, tuple(parameter.shape), placed)
