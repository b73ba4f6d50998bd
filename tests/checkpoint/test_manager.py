import json
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_like.checkpoint import commit, manager, saver, storage
from titan_like.checkpoint.manager import CheckpointError
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.storage import Entry, Folder, store_of
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Checkpoint


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


def save(folder: Folder, step: int) -> None:
    manager.save(folder, step, manager.model_tensors(nn.Linear(3, 2)), {"note": step}, "a = 1\n")


def new_folder(path: Folder) -> Folder:
    if isinstance(path, Path):
        path.mkdir()
    return path


def draws() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), float(np.random.randn()), random.random()]


def test_what_is_saved_comes_back_bit_by_bit(folder: Folder) -> None:
    model, optimizer = trained(steps=3)
    np.random.randn()  # leaves half of a pair behind, which is part of the state
    expected = {name: tensor.clone() for name, tensor in tensors(model, optimizer).items()}
    assert expected["optimizer.weight.step"].item() == 3 and "optimizer.bias.exp_avg_sq" in expected
    manager.save(folder, 3, tensors(model, optimizer), {"note": "x"}, "a = 1\n")
    drawn = draws()

    other, other_optimizer = trained(steps=0)
    manager.create_optimizer_state(other_optimizer)
    manager.load(folder, 3, tensors(other, other_optimizer), rng=True)
    assert draws() == drawn
    found = tensors(other, other_optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert manager.read_record(folder, 3) == {"step": 3, "note": "x"}
    assert (folder / "step-3" / "config.toml").read_text() == "a = 1\n"


def test_created_optimizer_state_is_that_before_the_first_step() -> None:
    torch.manual_seed(0)
    model, optimizer = trained(steps=0)
    before = [p.detach().clone() for p in model.parameters()]
    manager.create_optimizer_state(optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and optimizer.param_groups[0]["lr"] == 0.1
    created = manager.optimizer_tensors(model, optimizer)
    assert len(created) == 6 and all(not tensor.any() for tensor in created.values())


def test_which_step_is_chosen(folder: Folder) -> None:  # R081
    for step in (5, 10):
        save(folder, step)
    store_of(folder).begin(store_of(folder).draft(folder / "step-20"))
    assert manager.choose_step(folder, "auto") == 10
    assert manager.choose_step(folder, "never") is None
    assert manager.choose_step(folder, 5) == 5
    assert manager.choose_step(folder / "missing", "auto") is None
    with pytest.raises(ConfigError, match=r"resume is 7, but .* has the steps 5, 10; choose one or use auto"):
        manager.choose_step(folder, 7)
    with pytest.raises(ConfigError, match="has the steps none"):
        manager.choose_step(folder / "missing", 7)


def test_auto_passes_over_what_is_damaged_and_names_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10, 15):
        save(folder, step)
    store_of(folder).write(new_folder(folder / "step-20") / "file", b"")
    (folder / "step-15" / "__0_0.distcp").unlink()
    shards = folder / "step-10" / "__0_0.distcp"  # the larger tensor
    content = bytearray(shards.read_bytes())
    content[-100] ^= 1  # in the values of a tensor, where DCP itself notices nothing
    shards.write_bytes(bytes(content))
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "error", lambda text, *values: said.append(text % values))
    assert manager.choose_step(folder, "auto") == 5
    assert said == [
        f"passed over: {folder}/step-20 has no manifest, so it is not a complete checkpoint",
        f"DAMAGED CHECKPOINT passed over: {folder}/step-15/__0_0.distcp is missing",
        f"DAMAGED CHECKPOINT passed over: {shards} has other contents than were written",
    ]
    assert manager.choose_step(folder, "auto", verify=False) == 10  # by size alone it looks whole
    with pytest.raises(CheckpointError, match="has other contents than were written"):
        manager.choose_step(folder, 10)
    with pytest.raises(CheckpointError, match="has other contents than were written"):
        manager.load(folder, 10, manager.model_tensors(nn.Linear(3, 2)), rng=False)
    (folder / "step-5" / "record.json").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact \(see above\); restore one, or"):
        manager.choose_step(folder, "auto")


def test_nothing_is_written_over(folder: Folder) -> None:
    save(folder, 5)
    before = {path: path.read_bytes() for path in (folder / "step-5").iterdir()}
    with pytest.raises(CheckpointError, match="step-5 exists and is never written over"):
        save(folder, 5)
    assert {path: path.read_bytes() for path in (folder / "step-5").iterdir()} == before


def test_a_failed_write_leaves_nothing_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(storage, "sync", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match=r"step 5 could not be written .*step-5: .* No space left$"):
            save(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "step-5.tmp").mkdir()
    (tmp_path / "step-5.tmp" / "leftover").write_text("of a try that was killed")
    save(tmp_path, 5)
    assert manager.list_steps(tmp_path) == [5] and not (tmp_path / "step-5" / "leftover").exists()
    assert not (tmp_path / "step-5.tmp").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file" / "checkpoint", 5)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:  # R078
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save(tmp_path, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"step 6 could not be written to {tmp_path}/step-6"):
            save(tmp_path, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-5"]
    assert commit.find_damage(tmp_path / "step-5", hashes=True) == []


def test_what_does_not_fit_is_an_error(folder: Folder) -> None:
    save(folder, 5)
    with pytest.raises(
        CheckpointError,
        match=r"step-5 could not be loaded: model.weight is \(2, 3\) torch.float32, not \(2, 4\) torch.float32$",
    ):
        manager.load(folder, 5, manager.model_tensors(nn.Linear(4, 2)), rng=False)
    with pytest.raises(CheckpointError, match=r"model.bias is \(2,\) torch.float32, not \(2,\) torch.float64$"):
        manager.load(folder, 5, manager.model_tensors(nn.Linear(3, 2).double()), rng=False)  # DCP would cast
    model, optimizer = trained(steps=1)
    with pytest.raises(
        CheckpointError,
        match=r"loaded: optimizer.weight.step is not in it; optimizer.weight.exp_avg is not in it; .* and 3 more$",
    ):
        manager.load(folder, 5, tensors(model, optimizer), rng=False)


class Twice(nn.Module):
    """One name for two parameters, as on the first rank of a V-shaped pipeline with a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Parameter(torch.full((3,), float(number))) for number in (1, 2)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        yield from (("table", part) for part in self.parts)


def test_both_copies_of_a_tied_table_are_loaded(tmp_path: Path) -> None:
    saved, model = Twice(), Twice()
    for twice in (saved, model):
        twice.optimizer = torch.optim.AdamW(twice.parts, lr=0.1)
        manager.create_optimizer_state(twice.optimizer)
    saved.optimizer.state[saved.parts[0]]["exp_avg"].fill_(7)
    assert list(tensors(saved, saved.optimizer)) == [
        "model.table", "optimizer.table.step", "optimizer.table.exp_avg", "optimizer.table.exp_avg_sq"
    ]  # fmt: skip
    manager.save(tmp_path, 3, tensors(saved, saved.optimizer), {}, "")
    with torch.no_grad():
        model.parts[0].zero_()
    manager.load(tmp_path, 3, tensors(model, model.optimizer), rng=False)
    assert model.parts[0].tolist() == [1, 1, 1] and model.parts[1].tolist() == [2, 2, 2]
    manager.copy_tied(model, model.optimizer)
    assert model.parts[1].tolist() == [1, 1, 1]
    assert model.optimizer.state[model.parts[1]]["exp_avg"].tolist() == [7, 7, 7]


def test_groups_that_hold_nothing_change_nothing(tmp_path: Path) -> None:  # R085
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [], "weight_decay": 0.0}], lr=0.1)
    manager.create_optimizer_state(optimizer)

    def settings() -> list[dict[str, object]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    groups = settings()
    manager.save(tmp_path, 1, tensors(model, optimizer), {}, "")
    manager.load(tmp_path, 1, tensors(model, optimizer), rng=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert settings() == groups


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_save_in_the_background_holds_the_values_of_its_step(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # R070
    model, optimizer = trained(steps=2)
    expected = {name: tensor.clone() for name, tensor in tensors(model, optimizer).items()}
    name = "dcp_save" if mode == "thread" else "_save_in_process"
    write, begin, written = getattr(saver, name), threading.Event(), []

    def slow(staged: dict[str, torch.Tensor], path: Folder, group: manager.Group) -> dict[str, Entry]:
        begin.wait(30)
        written.append(dict(staged))
        return write(staged, path, group)

    monkeypatch.setattr(saver, name, slow)
    saving = Saver(tmp_path, Checkpoint(async_mode=mode))
    drawn = torch.get_rng_state()
    saving.save(2, tensors(model, optimizer), {}, "")
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    assert manager.list_steps(tmp_path) == []
    begin.set()
    saving.wait()
    assert not torch.equal(model.weight, expected["model.weight"]) and written
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    manager.load(tmp_path, 2, found, rng=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(torch.get_rng_state(), drawn)  # of the step, not of the time of writing


def test_an_error_in_the_background_is_raised_at_the_next_step_or_told(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:  # R075
    values, said = {"model.a": torch.ones(3)}, list[str]()
    stopping, going_on = (
        Saver(folder / on, Checkpoint(async_mode="thread", on_error=on)) for on in ("stop", "continue")
    )
    for saving in (stopping, going_on):
        saving.save(1, values, {}, "")
        saving.wait()

    def fail(*arguments: object) -> None:
        raise OSError(30, "Read-only file system", "a-file")

    monkeypatch.setattr(saver, "dcp_save", fail)
    monkeypatch.setattr(saver.logger, "error", lambda text, *values: said.append(text % values))
    stopping.save(2, values, {}, "")
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*stop/step-2: .*Read-only .*'a-file'"):
        for _ in range(1000):
            stopping.check()
            time.sleep(0.01)
    stopping.wait()  # told once

    going_on.save(2, values, {}, "")
    going_on.save(3, values, {}, "")
    assert len(said) == 1 and "step 2 could not be written" in said[0] and "going on" in said[0]
    with pytest.raises(CheckpointError, match="step 3 could not be written"):
        going_on.wait()  # what is waited for must be there
    monkeypatch.undo()
    going_on.save(4, values, {}, "")
    going_on.wait()
    assert manager.list_steps(folder / "continue") == [1, 4] and manager.list_steps(folder / "stop") == [1]


def test_one_save_is_in_flight_at_most_and_old_ones_go_after_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:  # R068
    saving = Saver(folder, Checkpoint(async_mode="thread", keep_latest_k=1, keep_every_n=4))
    there: list[list[int]] = []
    write = saver.dcp_save

    def slow(staged: dict[str, torch.Tensor], path: Folder, group: manager.Group) -> dict[str, Entry]:
        time.sleep(0.1)
        there.append(manager.list_steps(folder))
        return write(staged, path, group)

    monkeypatch.setattr(saver, "dcp_save", slow)
    for step in (2, 3, 4, 5, 6):
        saving.save(step, {"model.a": torch.full((3,), float(step))}, {}, "")
    saving.wait()
    assert there == [[], [2], [3], [4], [4, 5]] and manager.list_steps(folder) == [4, 6]
    found = {"model.a": torch.zeros(3)}
    manager.load(folder, 6, found, rng=False)
    assert found["model.a"].tolist() == [6, 6, 6]


def test_a_record_that_cannot_be_read_is_named(folder: Folder) -> None:
    save(folder, 5)
    assert json.loads((folder / "step-5" / "record.json").read_text()) == {"step": 5, "note": 5}
    (folder / "step-5" / "record.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-5/record.json cannot be read"):
        manager.read_record(folder, 5)
