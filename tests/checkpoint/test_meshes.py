"""Any mesh to any mesh: what one composition saves, every other loads bit by bit, parameters and optimizer state.

A chain of launches; in each, ranks build one composition after the other, load what the one before has saved, compare
whole tensors, train a step and save. So each link is a pair, and each state has come through all meshes before it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoint import ranks
from tests.distributed.compositions import composition
from titan_like.checkpoint import manager
from titan_like.models.flavors import resolve
from titan_like.optim.optimizer import build_optimizer
from titan_like.oracle import TIMEOUT_SECONDS, local_rows, make_batch
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel
from titan_like.step import read_results, training_step

UNTIED = [  # (ranks, compositions); a vocabulary of 257 is odd for every mesh
    (4, ["shard=4", "shard=2 tp=2", "pp=2 shard=2 schedule=Interleaved1F1B", "replicate=2 shard=2", "tp=4 kv=4"]),
    (3, ["shard=3"]),  # 257 rows and 32 columns by 3
    (
        4,
        [
            "pp=2 tp=2 schedule=ZBVZeroBubble",
            "pp=4",
            "cp=2 tp=2",
            "replicate=4 shard=1",
            "pp=2 cp=2 schedule=LoopedBFS",
        ],
    ),
    (1, ["shard=1"]),
    (4, ["pp=2 shard=2 schedule=DualPipeV", "replicate=2 shard=1 tp=2", "shard=4"]),
]
TIED = [
    (4, ["pp=2 shard=2 schedule=ZBVZeroBubble", "pp=2 tp=2", "shard=2 tp=2", "pp=2 tp=2 schedule=DualPipeV"]),
    (2, ["pp=2 schedule=Interleaved1F1B", "shard=2", "pp=2 schedule=ZBVZeroBubble"]),
    (1, ["shard=1"]),
]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


def whole(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every copy of every tensor here, whole; copies under one name must be equal. Collective within a stage."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        values = {f"model.{name}": parameter.detach()}
        values |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        for key, value in values.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value.clone()
            assert torch.equal(found.setdefault(key, full), full), f"two copies of {key} differ"
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


def walk(folder: Path, lines: list[str], extra: str, first_step: int) -> None:
    """Load step n (but the first of all), compare, train, save step n + 1, and write what it holds to n + 1.pt."""
    init_process_group(torch.device("cpu"), TIMEOUT_SECONDS)
    for step, line in enumerate(lines, start=first_step):
        config = composition(f"{line} {extra}")
        mesh = build_mesh("cpu", config.parallelism)
        shape = resolve(config.model.name, config.model.flavor, config.model.overrides)
        seed = config.training.model_copy(update={"seed": step})  # other weights than those to be loaded
        model = build_model(shape, config.model_copy(update={"training": seed}), mesh, torch.device("cpu"))
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        manager.create_optimizer_state(optimizer)
        tensors = {**manager.model_tensors(model), **manager.optimizer_tensors(model, optimizer)}
        if step:
            expected = torch.load(folder / f"{step}.pt")
            changed = differing(whole(model, optimizer), expected)
            assert changed, "nothing to load"
            manager.load(folder, step, tensors, rng=False)
            manager.copy_tied(model, optimizer)
            assert differing(whole(model, optimizer), expected) == [], line
        batches = local_rows(make_batch(shape, config, mesh, step), config, mesh)
        assert read_results([training_step(model, optimizer, batches, max_norm=1.0)])[0].applied
        manager.save(folder, step + 1, tensors, {}, "")
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, whole(model, optimizer))
        if dist.get_rank() == 0:
            union = {name: value for part in everywhere for name, value in part.items()}
            assert all(not differing(part, union) for part in everywhere), line
            torch.save(union, folder / f"{step + 1}.pt")
        dist.barrier()
    close_process_group()


@pytest.mark.parametrize(
    # Of 4 blocks with 9 parameters each, the last norm, and one or two tables.
    ("chain", "extra", "parameters"),
    [(UNTIED, "vocab=257 kv=4", 39), (TIED, "vocab=257 tied=true", 38)],
)
def test_every_mesh_loads_what_every_other_has_saved(
    tmp_path: Path, chain: list[tuple[int, list[str]]], extra: str, parameters: int
) -> None:  # R086
    step = 0
    for world, lines in chain:
        codes = ranks.run(world, walk, tmp_path, lines, extra, step, output=tmp_path / "out")
        said = "\n".join(ranks.said(tmp_path / "out", rank)[-3000:] for rank in range(world))
        assert codes == [0] * world, said
        step += len(lines)
    last = torch.load(tmp_path / f"{step}.pt")
    assert len(last) == 4 * parameters  # each has a value, two moments and a step
    assert {value.item() for name, value in last.items() if name.endswith(".step")} == {step}
    assert step - 1 == (14 if extra == "vocab=257 kv=4" else 7)  # pairs
