"""The formula against the trace: resident bytes equal, peaks within 3 %."""

import pytest

from estimation.formula import memory_of
from estimation.job import job_of
from estimation.profiles import TITAN_LIKE, TITAN_LIKE_CPU
from estimation.trace import trace
from titan_like.config import load_config

SMALL = ["--training.seq_len=256"]
FLOAT8 = ["--float8.enable", "--float8.emulate", "--float8.filter_fqns=output"]
CASES = {
    "selective, GPU kernels": (4, True, ["--activation_checkpoint.mode=selective"]),
    "full recompute, accumulation, fp32": (
        4, False,
        ["--activation_checkpoint.mode=full", "--training.global_batch_size=8",
         "--training.mixed_precision_param=float32"],
    ),
    "tensor x shard": (4, False, ["--parallelism.tensor_parallel_degree=2"]),
    "one rank, QK-norm, tied": (1, True, ["--model.name=qwen3", "--training.local_batch_size=2"]),
    "chunked loss": (4, True, ["--training.loss_chunks=3", "--training.local_batch_size=2"]),
    "chunked loss, tensor": (4, True, ["--training.loss_chunks=4", "--parallelism.tensor_parallel_degree=2"]),
    "chunked loss over the sequence": (
        2, True,
        ["--training.loss_chunks=4", "--parallelism.tensor_parallel_degree=2",
         "--parallelism.enable_loss_parallel=false"],
    ),
    "whole loss, fp32, CPU": (1, False, ["--training.mixed_precision_param=float32", "--training.loss_chunks=1"]),
    "an embedding that weighs more than the loss": (
        1, True, ["--training.loss_chunks=4", "--activation_checkpoint.mode=full"]
    ),
    "float8, gathered in float8": (
        4, True,
        [*FLOAT8, "--float8.enable_fsdp_float8_all_gather=true", "--model.overrides={vocab_size = 512}"]
    ),
    "float8 in rows, tensor parallelism, fp32": (
        2, False,
        [*FLOAT8, "--float8.recipe=rowwise", "--parallelism.tensor_parallel_degree=2",
         "--training.mixed_precision_param=float32", "--model.overrides={vocab_size = 512}"]
    ),
    "float8 that travels between tensor-parallel ranks": (
        4, True,
        [*FLOAT8, "--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=2",
         "--activation_checkpoint.mode=selective", "--model.overrides={vocab_size = 512}"]
    ),
    "pipeline": (2, True, ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_formula_and_trace_agree(case):
    world_size, is_gpu, argv = CASES[case]
    config = load_config([*SMALL, *argv])
    for memory in memory_of(job_of(config, world_size, TITAN_LIKE if is_gpu else TITAN_LIKE_CPU)):
        formula = memory.report()
        traced = trace(config, world_size, formula.rank, gpu=is_gpu)
        assert formula.resident == traced.resident
        assert formula.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.03)
