"""Start from a Hugging Face folder and export at the end on several meshes: the weights of one process, bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import convert_hf
from tests.checkpoint.test_hf import export, random_model
from tests.tiny_run import SHAPE, arguments, write_corpus
from titan_like.checkpoint import hf
from titan_like.models.flavors import ModelConfig

REPO = Path(__file__).resolve().parents[2]
ROWS = 91  # of the folder; the model has 96, and no mesh divides either evenly into what it holds
PARALLEL = {
    "dp": "data_parallel_shard_degree", "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree",
    "schedule": "pipeline_parallel_schedule",
}  # fmt: skip
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "schedule": "ZBVZeroBubble"}],
    4: [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}],
}

# One rank: runs one after the other; after the start the whole weights, then training and export.
WORKER = """
import json, os, sys
from functools import partial
import torch
import torch.distributed as dist
import titan_like.trainer
from torch.distributed.tensor import DTensor
from titan_like.config import load_config
from titan_like.trainer import Trainer

init = titan_like.trainer.init_process_group
for argv, started in json.loads(sys.argv[1]):
    store = dist.FileStore(f"{started}.store", int(os.environ["WORLD_SIZE"]))  # no port that another program could take
    titan_like.trainer.init_process_group = partial(init, store=store)
    trainer = Trainer(load_config(argv))
    whole = [
        (name, p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone())
        for name, p in trainer.model.named_parameters()
    ]
    torch.save(whole, f"{started}-{os.environ['RANK']}.pt")
    trainer.fit()
    trainer.close()
"""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(270)]


def launch(processes: int, runs: list[tuple[list[str], Path]], folder: Path) -> None:
    plan = json.dumps([(argv, str(started)) for argv, started in runs])
    common = {
        **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, plan], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=(folder / f"stderr-{rank}").open("w"),
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * processes, "".join((folder / f"stderr-{rank}").read_text() for rank in range(processes))


@pytest.mark.parametrize("processes", MESHES)
def test_start_and_export_on_every_mesh(processes: int, tmp_path: Path) -> None:
    """R217: nobody waits for ever, and the files equal those of one process; tied and untied in turn."""
    write_corpus(tmp_path / "train")
    runs, kinds = [], {}
    for tied in (False, True):
        shape = {**SHAPE, "vocab_size": ROWS, "n_layers": 4, "n_kv_heads": 2, "head_dim": 8, "tie_embeddings": tied}
        kinds[tied] = random_model(ModelConfig(**shape))
        export(kinds[tied], tmp_path / f"tied {tied}")
    for number, mesh in enumerate(MESHES[processes]):
        tied = number % 2 == 1
        settings = {
            **{f"parallelism__{PARALLEL[axis]}": degree for axis, degree in mesh.items()},
            "model__name": "llama2", "model__overrides__n_kv_heads": 2, "model__overrides__n_layers": 4,
            "model__overrides__tie_embeddings": str(tied).lower(),
            "model__hf_path": tmp_path / f"tied {tied}" / "hf",
            "training__local_batch_size": 4, "training__steps": 1, "checkpoint__enable": True,
            "checkpoint__export_hf": "hf",
        }  # fmt: skip
        runs.append((arguments(tmp_path / f"run-{number}", **settings), tmp_path / f"started-{number}"))
    launch(processes, runs, tmp_path)

    for number, mesh in enumerate(MESHES[processes]):
        source = kinds[number % 2 == 1]
        held = set()
        for rank in range(processes):
            for name, whole in torch.load(tmp_path / f"started-{number}-{rank}.pt"):
                expected = source.get_parameter(name)
                assert torch.equal(whole[: len(expected)], expected), (mesh, name)
                assert len(whole) == (96 if "embeddings" in name or name == "output.weight" else len(expected))
                assert whole[len(expected) :].any() or len(whole) == len(expected)  # the rest is as it was drawn
                held.add(name)
        assert held == {name for name, _ in source.named_parameters()}

        run = tmp_path / f"run-{number}"
        convert_hf.main(["export", str(run / "checkpoint"), str(tmp_path / f"one-{number}")])
        for file in ("model.safetensors", "config.json"):
            assert (run / "hf" / file).read_bytes() == (tmp_path / f"one-{number}" / file).read_bytes(), (mesh, file)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    """Three ranks write each file once; until the end there are only temporary names."""
    model = random_model(ModelConfig(**SHAPE, head_dim=8))
    whole = export(model, tmp_path, max_shard_bytes=4000)
    one = {path.name: path.read_bytes() for path in whole.iterdir()}
    shared = hf.Export(tmp_path / "shared", model.config, max_shard_bytes=4000)
    written = []
    for rank in range(3):
        before = set((tmp_path / "shared").glob("*"))
        shared.write(tmp_path / "checkpoint" / "step-7", rank, 3)
        written.append(set((tmp_path / "shared").glob("*")) - before)
    assert all(path.suffix == ".tmp" for files in written for path in files)
    assert sum(map(len, written)) == len(shared.shards) > 3 and min(map(len, written)) >= 1
    shared.finish({"eos_token_id": 2})
    assert {path.name: path.read_bytes() for path in (tmp_path / "shared").iterdir()} == one
