"""One rank of a large world in one process."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
LARGE = [
    *("--comm.mode", "fake", "--model.flavor", "405B", "--training.seq_len", "8192"),
    *("--training.local_batch_size", "16", "--parallelism.tensor_parallel_degree", "8"),
    *("--parallelism.pipeline_parallel_degree", "8"),
]


def run(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NPROC": str(processes), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "titan_like.train", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def cpu_seconds() -> float:
    """Of all processes that were waited for: other tests may run beside this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_small_world_says_what_each_rank_holds() -> None:
    result = run(
        16, "--comm.mode", "fake", "--training.local_batch_size", "4", "--training.seq_len", "64",
        "--parallelism.pipeline_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2",
        "--parallelism.context_parallel_degree", "2", "--comm.fake_rank", "15", "--activation_checkpoint.mode", "full",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "mesh of 16 ranks: pp 2 x dp_replicate 1 x dp_shard 2 x cp 2 x tp 2" in result.stdout
    assert "rank 15 at pp 1, dp_replicate 0, dp_shard 1, cp 1, tp 1" in result.stdout
    # llama3 debug: 4 blocks of 196,864 and two tables of 524,288 and a norm of 128, split in the middle.
    assert "pp rank 1, stage 1: layers 2 to 3, norm and head, 918,144 parameters" in result.stdout
    assert "one step of 1 micro-batches of 4 x 64 tokens ran through" in result.stdout


def test_a_rank_outside_the_world_is_refused() -> None:
    result = run(4, "--comm.mode", "fake", "--comm.fake_rank", "4")
    assert result.returncode == 2
    assert "comm.fake_rank (4) is not below the number of processes (4)" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (512, ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B", "--activation_checkpoint.mode", "full"]),
        (16384, ["--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", "--comm.fake_rank", "16383",
                 "--parallelism.context_parallel_degree", "2", "--parallelism.data_parallel_replicate_degree", "4"]),
    ],
)  # fmt: skip
def test_a_large_world_takes_under_a_minute_and_4_gib(processes: int, more: list[str]) -> None:
    before = cpu_seconds()
    result = run(processes, *LARGE, *more)
    assert result.returncode == 0, result.stderr
    gib = float(result.stdout.split(" GiB of host memory")[0].rsplit(" ", 1)[1])
    assert gib < 4
    assert cpu_seconds() - before < 60, "measured alone: 25 s for 512 ranks, 23 s for 16,384"
