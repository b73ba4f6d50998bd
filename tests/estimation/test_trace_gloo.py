"""Traced memory against real gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LINES = (
    "batch=4",
    "recompute=full",
    "recompute=selective",
    "dtype=bfloat16",
    "reshard=always global=16",
    "global=16 reshard=never",
    "replicate=2 shard=1",
    "cp=2 rotate=alltoall",
    "pp=2",
    "pp=2 schedule=GPipe",
    "pp=2 schedule=Interleaved1F1B",
    "pp=2 schedule=ZBVZeroBubble",
)
SCALARS = 64  # bytes: numbers that were all-reduced and that a thread of gloo has not let go yet


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_gloo_processes_use_what_was_traced(tmp_path: Path) -> None:
    """What gloo allocates inside its collectives comes on top, and is told apart by the collective that did.

    The profiler does not see when a thread of gloo lets go of a gathered buffer: such bytes are left at the end, and
    bound the difference.
    """
    path = tmp_path / "found.jsonl"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.estimation.gloo_worker", str(path), *LINES,
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=500, capture_output=True)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 2 * len(LINES)
    for entry in found:
        unseen = max(entry["unseen"], 0) if entry["transport"] else 0
        assert 0 <= entry["measured"] - entry["traced"] <= SCALARS + unseen, entry
    sharded = next(entry for entry in found if entry["line"] == "batch=4")
    assert {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"} <= set(sharded["transport"])
