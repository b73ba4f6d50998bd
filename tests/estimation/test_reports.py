"""Public reports of estimators that left things out, as tests of the kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from estimation.formula import memory_of
from estimation.job import job_of
from estimation.trace import trace
from estimation.types import ALL_GATHER
from titan_like.config import Config, load_config
from titan_like.models.flavors import parameter_count, resolve

ROOT = Path(__file__).parents[2]
SHAPE = {"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 172, "max_seq_len": 16}
PARAMETERS = 2 * 256 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172)
TENSORS = 3 + 2 * 9


def config(*more: str) -> Config:
    overrides = [f"--model.overrides.{key}={value}" for key, value in SHAPE.items()]
    return load_config([*overrides, "--training.seq_len=16", "--training.mixed_precision_param=float32", *more])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_r173_every_component_follows_degree_and_dtype(ranks: int, optimizer: str) -> None:
    """fp32: 4 bytes for weights, 4 for gradients, 8 for AdamW's moments (and 4 a tensor: its step), none for SGD; all
    halved by two shards, since every first dim is even."""
    settings = config(f"--optimizer.name={optimizer}")
    assert parameter_count(resolve("llama3", "debug", SHAPE)) == PARAMETERS
    expected = 8 * PARAMETERS // ranks + 4 * TENSORS if optimizer == "adamw" else 0
    for resident in (
        memory_of(job_of(settings, ranks))[0].resident,
        trace(settings, ranks, 0, gpu=False).resident,
    ):
        assert (resident.parameters, resident.gradients) == (4 * PARAMETERS // ranks,) * 2
        assert resident.optimizer == expected


def test_r173_bf16_adds_its_copy_to_the_transient_bytes_only() -> None:
    """2 bytes a weight where a layer computes: the largest copies at a time are a block's or the head's."""
    plain, copied = (
        trace(config(f"--training.mixed_precision_param={dtype}"), 1, 0, gpu=False) for dtype in ("float32", "bfloat16")
    )
    assert plain.resident == copied.resident
    block = (PARAMETERS - 2 * 256 * 64 - 64) // 2
    assert plain.transient[ALL_GATHER] == 0
    assert copied.transient[ALL_GATHER] >= 2 * block


def test_r172_tensor_and_pipeline_parallelism_have_numbers() -> None:
    """Also for a world that is not there, in one process of less than 1 GB."""
    program = (
        "import re, sys; from pathlib import Path; from estimation.__main__ import estimate; estimate(sys.argv[1:]);"
        # Not ru_maxrss, which also counts what the parent held when it forked.
        "print('peak KiB', re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    command = [
        sys.executable, "-c", program, "--model.flavor=8B", "--world_size=8",
        "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2",
        "--training.local_batch_size=2", "--training.seq_len=1024",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
    )
    assert "resident" in done.stdout and "activations" in done.stdout
    assert int(done.stdout.split("peak KiB ")[1]) * 1024 < 1e9
