"""The real trainer on two ranks, one axis at a time: the same losses, norms, samples and counts as on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import arguments, logged, run, write_corpus

REPO = Path(__file__).parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
MESHES: dict[str, dict[str, object]] = {
    # One row per micro-batch: its tokens and labels must not share memory, as slices of one row easily do.
    "dp": {"parallelism__data_parallel_shard_degree": 2, "training__local_batch_size": 1},
    "tp": {"parallelism__tensor_parallel_degree": 2, "training__local_batch_size": 1},
    "cp": {"parallelism__context_parallel_degree": 2},
    "pp": {"parallelism__pipeline_parallel_degree": 2},
    "pp, accumulating": {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 2},
}
SETTINGS: dict[str, object] = {
    "training__steps": 3,
    "training__local_batch_size": 4,
    "training__global_batch_size": 4,
    "training__max_norm": 0.1,
    "data__eod_mask_loss": "true",  # documents end inside rows: some labels are ignored
    "model__overrides__n_kv_heads": 2,
    "metrics__log_sample_ids": "true",
    "validation__interval": 3,
    "validation__samples": 6,
    "model__overrides__n_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    write_corpus(folder / "train")
    run(folder / "one", **SETTINGS, data__validation=folder / "train")
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_does_not_depend_on_the_mesh(mesh: str, folder: Path) -> None:
    """R090 R100 R105 R118 R149 R151: what is logged is of the whole run, whatever stage or shard rank 0 holds."""
    settings = {**SETTINGS, **MESHES[mesh], "data__validation": folder / "train"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["titan_like.train", *arguments(folder / mesh, **settings)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr

    expected, found = logged(folder / "one"), logged(folder / mesh)
    assert len(found) == len(expected) == 4  # three steps and a validation
    for line, wanted in zip(found, expected, strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & set(wanted):
            assert line[key] == pytest.approx(wanted[key], rel=1e-5), (key, line["step"])
        for key in {"step", "processed_positions", "valid_labels", "validation_labels", "lr"} & set(wanted):
            assert line[key] == wanted[key], (key, line["step"])
    assert found[-2]["processed_positions"] == 3 * 4 * 16 > found[-2]["valid_labels"]
    assert sample_ids(folder / mesh) == sample_ids(folder / "one")
    assert f"loss {expected[0]['loss']:.4f}" in result.stdout


def sample_ids(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "sample_ids.jsonl").read_text().splitlines()]
