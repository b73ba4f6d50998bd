"""Checkpoints behind URLs: memory:// is an object store in this process, file:// one that all processes see."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.registry import known_implementations
from upath import UPath

from titan_like.checkpoint import commit, dcp_files, manager
from titan_like.checkpoint.dcp_files import RemoteFiles
from titan_like.checkpoint.find import find_checkpoint
from titan_like.checkpoint.manager import CheckpointError
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.storage import MANIFEST, REMOTE, check_url, locate
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Checkpoint
from titan_like.launch import check_settings

FILES = {".metadata", *(f"__0_{part}.distcp" for part in range(4)), "config.toml", "record.json", "rng-0.pt"}
THREADS_FAIL = "ignore::pytest.PytestUnhandledThreadExceptionWarning"


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors(step: int, count: int = 6) -> dict[str, torch.Tensor]:
    return {f"model.{number}": torch.full((5, number + 1), float(step)) for number in range(count)}


def save(folder: UPath, step: int) -> None:
    manager.save(folder, step, tensors(step), {}, "a = 1\n")


def loaded(folder: UPath, step: int) -> bool:
    found = tensors(0)
    manager.load(folder, step, found, rng=True)
    return all(torch.equal(found[name], value) for name, value in tensors(step).items())


def test_what_lies_in_a_store_is_what_lies_in_a_folder(remote: UPath) -> None:
    save(remote, 5)
    assert set(REMOTE.sizes(remote / "step-5")) == {*FILES, MANIFEST} and REMOTE.folders(remote) == ["step-5"]
    for name, entry in commit.read_manifest(remote / "step-5").items():  # hashed on the way, not read back
        assert REMOTE.measure(remote / "step-5" / name) == entry
    assert loaded(remote, 5)
    metadata = dcp_files.reader(remote / "step-5").read_metadata()
    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id == str(remote / "step-5")


def flip(path: UPath) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    REMOTE.write(path, bytes(content))


def truncate(path: UPath) -> None:
    REMOTE.write(path, path.read_bytes()[:-1])


def delete(path: UPath) -> None:
    path.unlink()


def swap(path: UPath) -> None:
    REMOTE.write(path, (path.parent.parent / "step-5" / path.name).read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, delete, swap])
def test_a_damaged_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    remote: UPath, damage: Callable[[UPath], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "error", lambda text, *values: said.append(text % values))
    save(remote, 5)
    for name in sorted({*FILES, MANIFEST}):
        save(remote, 10)
        path = remote / "step-10" / name
        if damage is swap and path.read_bytes() == (remote / "step-5" / name).read_bytes():
            assert name in ("config.toml", "rng-0.pt")  # what did not change between the steps
        else:
            damage(path)
            said.clear()
            assert manager.choose_step(remote, "auto") == 5
            assert len(said) == 1 and "passed over" in said[0] and f"{remote}/step-10" in said[0]
            assert name.removesuffix(".json") in said[0] or (  # "has no manifest"
                damage is swap and "holds the checkpoint of step 5" in said[0]
            )
        REMOTE.remove(remote / "step-10")
    assert loaded(remote, 5)


@pytest.mark.filterwarnings(THREADS_FAIL)
@pytest.mark.parametrize("name", [*sorted(FILES), MANIFEST])
def test_a_write_that_fails_before_the_manifest_leaves_no_checkpoint(
    remote: UPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(remote, 5)
    with monkeypatch.context() as patch:
        refuse_to_write(patch, remote, name)
        reason = f"step 10 could not be written to {remote}/step-10: .*no rights to write {name}"
        with pytest.raises(CheckpointError, match=reason):
            save(remote, 10)
    assert REMOTE.folders(remote) == ["step-5"] and loaded(remote, 5)
    save(remote, 10)
    assert commit.list_steps(remote) == [5, 10] and loaded(remote, 10)


def refuse_to_write(patch: pytest.MonkeyPatch, folder: UPath, name: str) -> None:
    """As drivers do: with an error that is no OSError."""
    for method in ("pipe_file", "open"):
        allowed = getattr(folder.fs, method)

        def write(path: str, *arguments: Any, allowed: Any = allowed, **named: Any) -> Any:
            written = path.rsplit("/", 1)[-1].removesuffix(".tmp")
            if written == name and arguments[0] != "rb":
                raise RuntimeError(f"no rights to write {name}")
            return allowed(path, *arguments, **named)

        patch.setattr(folder.fs, method, write)


def test_what_a_killed_save_has_left_is_never_a_checkpoint(remote: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each object that a save writes, the store as it then is: a kill leaves just that."""
    save(remote, 5)
    states: list[list[int]] = []
    for method in ("pipe_file", "mv"):
        allowed = getattr(remote.fs, method)

        def look(*arguments: Any, allowed: Any = allowed, **named: Any) -> None:
            states.append(commit.list_steps(remote))
            allowed(*arguments, **named)
            states.append(commit.list_steps(remote))

        monkeypatch.setattr(remote.fs, method, look)
    save(remote, 10)
    monkeypatch.undo()
    assert states == [[5]] * 9 + [[5, 10]]  # .metadata, rng, config, record and, alone, the manifest

    (remote / "step-10" / MANIFEST).unlink()
    assert commit.list_steps(remote) == [5] and commit.uncommitted_steps(remote) == [10]
    commit.retain(remote, 1, 0)
    assert commit.list_steps(remote) == [5]  # not counted
    with pytest.raises(ConfigError, match="has the steps 5; choose one"):
        manager.choose_step(remote, 10)
    assert manager.choose_step(remote, "auto") == 5
    REMOTE.write(remote / "step-7" / "__0_0.distcp", b"of another save")
    commit.remove_leftovers(remote)
    assert REMOTE.folders(remote) == ["step-5"] and loaded(remote, 5)


def test_a_store_that_gives_no_answer_loses_nothing(remote: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that cannot be looked at is not a missing one, whose checkpoint would be deleted."""
    save(remote, 5)

    def fail(path: str, **named: Any) -> None:
        raise PermissionError("403 Forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(remote.fs, "info", fail)
        with pytest.raises(PermissionError):
            commit.remove_leftovers(remote)
        with pytest.raises(CheckpointError, match="cannot be listed: 403 Forbidden"):
            manager.choose_step(remote, "auto")
    assert loaded(remote, 5)


@pytest.mark.filterwarnings(THREADS_FAIL)
def test_one_of_several_streams_that_fails_fails_the_save(remote: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP forgets the error of a thread, and the tensors that it had to write."""
    with monkeypatch.context() as patch:
        refuse_to_write(patch, remote, "__0_3.distcp")
        patch.setattr(dcp_files, "THREADS", 4)
        with pytest.raises(CheckpointError, match=r"no rights to write __0_3.distcp"):
            save(remote, 5)
    files = RemoteFiles(remote)
    with pytest.raises(ZeroDivisionError), files.create_stream("any/a", "wb") as stream:
        stream.write(b"abc")
        raise ZeroDivisionError
    assert files.written == {} and [type(error) for error in files.errors] == [ZeroDivisionError]


def test_saves_in_the_background(remote: UPath) -> None:
    saver = Saver(remote, Checkpoint(async_mode="thread", keep_latest_k=2, keep_every_n=3))
    values = tensors(0)
    for step in range(1, 6):
        for value in values.values():
            value.fill_(step)
        saver.save(step, values, {}, "")
    saver.wait()
    assert commit.list_steps(remote) == [3, 4, 5] and all(loaded(remote, step) for step in (3, 4, 5))


def test_a_checkpoint_is_found_by_its_url(remote: UPath) -> None:
    for step in (5, 10):
        save(remote, step)
    assert find_checkpoint(f"{remote}/") == (remote, 10) and find_checkpoint(f"{remote}/step-5") == (remote, 5)
    with pytest.raises(ConfigError, match=f"{remote}/step-7 holds no complete checkpoint"):
        find_checkpoint(f"{remote}/step-7")


def test_where_a_name_leads(tmp_path: Path) -> None:
    assert locate("checkpoint", tmp_path) == tmp_path / "checkpoint"
    assert locate(f"{tmp_path}/x", Path("run")) == tmp_path / "x" and locate("x") == Path("x")
    url = locate("memory://bucket/x/", tmp_path)
    assert isinstance(url, UPath) and str(url) == "memory://bucket/x" and url.name == "x"


def test_a_missing_driver_and_an_unknown_protocol_are_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = {"class": "a_driver_that_nobody_has.FileSystem", "err": "Install a_driver to access it"}
    monkeypatch.setitem(known_implementations, "nobodys", driver)
    missing = (
        'checkpoint.folder: "nobodys://bucket/x" needs a driver that is missing (Install a_driver to access it); '
        "install that package with pip, or use a local folder"
    )
    assert check_url("checkpoint.folder", "nobodys://bucket/x") == [missing]
    config = load_config(["--checkpoint.folder=nobodys://bucket/x", f"--job.dump_folder={tmp_path}"])
    assert check_settings(config, world_size=1) == [missing]
    (problem,) = check_url("checkpoint.folder", "tape://x")
    assert problem.startswith('checkpoint.folder: "tape://x" cannot be used (') and "that fsspec knows" in problem
    with pytest.raises(ConfigError, match="needs a driver that is missing"):
        find_checkpoint("nobodys://bucket/x")


def test_whether_something_can_be_written_is_tried(tmp_path: Path) -> None:
    assert check_url("checkpoint.folder", f"file://{tmp_path}/new") == []
    assert check_url("checkpoint.folder", "memory://bucket/new") == []
    assert list((tmp_path / "new").iterdir()) == [] and REMOTE.folders(UPath("memory://bucket")) == []
    (tmp_path / "file").write_text("")
    (problem,) = check_url("checkpoint.folder", f"file://{tmp_path}/file/x")
    assert problem.startswith(f'checkpoint.folder is "file://{tmp_path}/file/x", but nothing can be written there (')
