import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_like.checkpoint import manager
from titan_like.checkpoint.manager import CheckpointError
from titan_like.config.errors import ConfigError


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(steps: int, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {**manager.model_tensors(model), **manager.optimizer_tensors(model, optimizer)}


def save(folder: Path, step: int) -> None:
    manager.save(folder, step, manager.model_tensors(nn.Linear(3, 2)), {"note": step}, "a = 1\n")


def draws() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), float(np.random.randn()), random.random()]


def test_what_is_saved_comes_back_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = trained(steps=3)
    np.random.randn()  # leaves half of a pair behind, which is part of the state
    expected = {name: tensor.clone() for name, tensor in tensors(model, optimizer).items()}
    assert expected["optimizer.weight.step"].item() == 3 and "optimizer.bias.exp_avg_sq" in expected
    manager.save(tmp_path, 3, tensors(model, optimizer), {"note": "x"}, "a = 1\n")
    drawn = draws()

    other, other_optimizer = trained(steps=0)
    manager.create_optimizer_state(other_optimizer)
    manager.load(tmp_path, 3, tensors(other, other_optimizer), rng=True)
    assert draws() == drawn
    found = tensors(other, other_optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert manager.read_record(tmp_path, 3) == {"format": 1, "step": 3, "note": "x"}
    assert (tmp_path / "step-3" / "config.toml").read_text() == "a = 1\n"


def test_created_optimizer_state_is_that_before_the_first_step() -> None:
    torch.manual_seed(0)
    model, optimizer = trained(steps=0)
    before = [p.detach().clone() for p in model.parameters()]
    manager.create_optimizer_state(optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and optimizer.param_groups[0]["lr"] == 0.1
    created = manager.optimizer_tensors(model, optimizer)
    assert len(created) == 6 and all(not tensor.any() for tensor in created.values())


def test_only_complete_checkpoints_are_listed(tmp_path: Path) -> None:  # R073
    for step in (12, 5):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-5", tmp_path / "step-20.tmp")
    for name in ("step-old", "notes", "step-7", "step-05"):  # step-7 has no record
        (tmp_path / name).mkdir()
    shutil.copy(tmp_path / "step-5" / "record.json", tmp_path / "step-05")
    (tmp_path / "step-9").write_text("a file")
    assert manager.list_steps(tmp_path) == [5, 12]
    assert manager.list_steps(tmp_path / "missing") == []
    assert manager.step_to_resume(tmp_path, "auto") == 12
    assert manager.step_to_resume(tmp_path, "never") is None
    assert manager.step_to_resume(tmp_path, 5) == 5
    assert manager.step_to_resume(tmp_path / "missing", "auto") is None


def test_a_step_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:  # R081
    for step in (5, 10):
        save(tmp_path, step)
    with pytest.raises(ConfigError, match=r"resume is 7, but .* has the steps 5, 10; choose one or use auto"):
        manager.step_to_resume(tmp_path, 7)
    with pytest.raises(ConfigError, match="has the steps none"):
        manager.step_to_resume(tmp_path / "missing", 7)


def test_keep_latest_leaves_all_else_alone(tmp_path: Path) -> None:  # R073
    for step in (1, 2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old" / "mine.txt").write_text("keep")
    manager.keep_latest(tmp_path, 0)
    assert manager.list_steps(tmp_path) == [1, 2, 9, 10]
    manager.keep_latest(tmp_path, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-10", "step-9", "step-old"]
    assert (tmp_path / "step-old" / "mine.txt").read_text() == "keep"
    manager.keep_latest(tmp_path / "missing", 2)


def test_what_cannot_be_deleted_warns_and_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R073
    save(tmp_path, 1)
    save(tmp_path, 2)

    def refuse(path: Path) -> None:
        raise OSError("disk on fire")

    said: list[str] = []
    monkeypatch.setattr(manager.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(manager.shutil, "rmtree", refuse)
    manager.keep_latest(tmp_path, 1)
    assert said == ["the old checkpoint of step 1 could not be deleted: disk on fire"]
    assert manager.list_steps(tmp_path) == [2]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    save(tmp_path, 5)
    before = {path: path.read_bytes() for path in (tmp_path / "step-5").iterdir()}
    with pytest.raises(CheckpointError, match="step-5 exists and is never written over"):
        save(tmp_path, 5)
    assert {path: path.read_bytes() for path in (tmp_path / "step-5").iterdir()} == before


def test_a_failed_write_leaves_no_checkpoint_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_sync_folder", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match=r"step 5 could not be written .* No space left"):
            save(tmp_path, 5)
    assert manager.list_steps(tmp_path) == [] and (tmp_path / "step-5.tmp" / "record.json").is_file()
    (tmp_path / "step-5.tmp" / "leftover").write_text("of the failed try")
    save(tmp_path, 5)
    assert manager.list_steps(tmp_path) == [5] and not (tmp_path / "step-5" / "leftover").exists()
    assert not (tmp_path / "step-5.tmp").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file" / "checkpoint", 5)


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 5)
    size = r"Size mismatch between saved torch.Size\(\[2, 3\]\) and current: torch.Size\(\[2, 4\]\) for model.weight"
    with pytest.raises(CheckpointError, match=f"step-5 could not be loaded: {size}$"):
        manager.load(tmp_path, 5, manager.model_tensors(nn.Linear(4, 2)), rng=False)
    model, optimizer = trained(steps=1)
    with pytest.raises(
        CheckpointError, match=r"step-5 could not be loaded: Missing key .* optimizer\.bias\.exp_avg\.$"
    ):
        manager.load(tmp_path, 5, tensors(model, optimizer), rng=False)


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = tmp_path / "step-5" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ConfigError, match="format 2, this version reads 1"):
        manager.read_record(tmp_path, 5)
