"""What makes a folder a checkpoint, and what is noticed when it is not what was written; local or behind a URL."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_like.checkpoint import commit, storage
from titan_like.checkpoint.commit import CheckpointError, DamagedError
from titan_like.checkpoint.storage import Folder, store_of
from titan_like.config.errors import ConfigError

CONTENTS = {"a.distcp": b"abc" * 1000, "record.json": b'{"step": 5}', ".metadata": b"\x80\x04", "empty": b""}


def make(folder: Folder, step: int, contents: dict[str, bytes] = CONTENTS) -> Folder:
    store, final = store_of(folder), folder / f"step-{step}"
    draft = store.draft(final)
    store.begin(draft)
    commit.commit(draft, final, step, {name: store.write(draft / name, content) for name, content in contents.items()})
    return final


def put(path: Folder, content: bytes = b"") -> None:
    if isinstance(path, Path):
        path.parent.mkdir(exist_ok=True)
    store_of(path).write(path, content)


def copy(path: Folder, target: Folder) -> None:
    for name in store_of(path).sizes(path):
        put(target / name, (path / name).read_bytes())


def test_the_manifest_holds_what_was_written(folder: Folder) -> None:
    path = make(folder, 5)
    files = commit.read_manifest(path)
    assert files["a.distcp"] == {"size": 3000, "sha256": hashlib.sha256(b"abc" * 1000).hexdigest()}
    assert files["empty"] == {"size": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    assert files.keys() == CONTENTS.keys() and store_of(folder).folders(folder) == ["step-5"]
    put(path / "notes.txt", b"the user's own")
    assert commit.find_damage(path, hashes=True) == []


def flip(path: Folder) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Folder) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Folder) -> None:
    path.unlink()


def swap(path: Folder) -> None:
    """For the file of the same name in another checkpoint, of the same length."""
    path.write_bytes((path.parent.parent / "step-6" / path.name).read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, delete, swap])
@pytest.mark.parametrize("name", ["a.distcp", "record.json", ".metadata", "manifest.json"])
def test_every_damage_of_every_file_is_named(folder: Folder, name: str, damage: Callable[[Any], None]) -> None:
    path = make(folder, 5)
    make(folder, 6, {name: content[::-1] for name, content in CONTENTS.items()})
    damage(path / name)
    (problem,) = commit.find_damage(path, hashes=True)
    assert str(path) in problem
    assert name in problem or (damage is swap and "holds the checkpoint of step 6" in problem)
    if name != "manifest.json":  # without hashes sizes are still compared
        assert bool(commit.find_damage(path, hashes=False)) == (damage in (truncate, delete))


def test_no_byte_of_the_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    path = make(tmp_path, 5) / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (1, 0x20):  # the second changes upper to lower case
            changed = bytearray(whole)
            changed[position] ^= bit
            path.write_bytes(bytes(changed))
            assert commit.find_damage(path.parent, hashes=False), (position, bit)


def test_a_folder_under_another_step_s_name_is_damaged(folder: Folder) -> None:
    copy(make(folder, 5), folder / "step-7")
    with pytest.raises(DamagedError, match="step-7 holds the checkpoint of step 5"):
        commit.read_manifest(folder / "step-7")


def test_the_files_are_shared_out_and_none_is_left_out(folder: Folder) -> None:
    path = make(folder, 5)
    for name in CONTENTS:
        (path / name).unlink()
    parts = [commit.find_damage(path, hashes=True, part=part, parts=3) for part in range(3)]
    assert [len(problems) for problems in parts] == [2, 1, 1]
    assert sorted(problem for problems in parts for problem in problems) == sorted(
        f"{path / name} is missing" for name in CONTENTS
    )


def test_another_format_is_refused(folder: Folder) -> None:
    path = make(folder, 5)
    content = {"format": 9, "step": 5, "files": {}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "digest": digest}))
    with pytest.raises(ConfigError, match="format 9, this version reads 2; use the version"):
        commit.find_damage(path, hashes=True)


def test_what_a_rank_wrote_elsewhere_is_not_committed(folder: Folder) -> None:
    store = store_of(folder)
    draft = store.draft(folder / "step-5")
    store.begin(draft)
    store.write(draft / "__0_0.distcp", b"abc")
    files = {"__0_0.distcp": {"size": 3, "sha256": ""}, "__1_0.distcp": {"size": 3, "sha256": ""}}
    with pytest.raises(OSError, match=r"__1_0.distcp is not what a rank wrote; all nodes must share the folder"):
        commit.commit(draft, folder / "step-5", 5, files)
    assert commit.list_steps(folder) == []


def test_only_committed_checkpoints_are_listed(folder: Folder) -> None:  # R073
    for step in (12, 5):
        make(folder, step)
    for name in ("step-20.tmp", "step-05"):
        copy(folder / "step-5", folder / name)
    for name in ("step-old", "notes", "step-7"):
        put(folder / name / "file")
    put(folder / "step-9", b"a file")
    assert commit.list_steps(folder) == [5, 12] and commit.uncommitted_steps(folder) == [7]
    assert commit.list_steps(folder / "missing") == []


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 5)
    for name in ("step-6.tmp", "step-old.tmp", "notes.tmp"):
        put(tmp_path / name / "file")
    (tmp_path / "step-7.tmp").write_text("a file")
    commit.remove_leftovers(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-5", "step-old.tmp", "notes.tmp", "step-7.tmp"}
    commit.remove_leftovers(tmp_path / "missing")


def test_retention_leaves_all_else_alone(folder: Folder) -> None:  # R073
    for step in (1, 2, 4, 8, 10, 9):
        make(folder, step)
    put(folder / "notes" / "mine.txt")
    put(folder / "step-3" / "file")  # not committed: neither counted nor deleted
    put(folder / "step-old" / "mine.txt", b"keep")
    commit.retain(folder, 0, 0)
    assert commit.list_steps(folder) == [1, 2, 4, 8, 9, 10]
    commit.retain(folder, 2, 4)
    assert commit.list_steps(folder) == [4, 8, 9, 10]
    commit.retain(folder, 1, 0)
    assert sorted(store_of(folder).folders(folder)) == ["notes", "step-10", "step-3", "step-old"]
    assert (folder / "step-old" / "mine.txt").read_bytes() == b"keep"
    commit.retain(folder / "missing", 2, 0)


def refuse(*arguments: Any, **named: Any) -> None:
    raise OSError("disk on fire")


def test_what_cannot_be_deleted_warns_and_is_no_checkpoint_any_more(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:  # R073
    make(folder, 1)
    make(folder, 2)
    said: list[str] = []
    monkeypatch.setattr(commit.logger, "warning", lambda text, *values: said.append(text % values))
    with monkeypatch.context() as patch:
        if isinstance(folder, Path):
            patch.setattr(storage.shutil, "rmtree", refuse)
        else:
            delete_one = folder.fs.rm
            patch.setattr(folder.fs, "rm", lambda *a, recursive=False, **k: (refuse if recursive else delete_one)(*a))
        commit.retain(folder, 1, 0)
    assert said == [f"{folder / 'step-1'} could not be deleted: disk on fire"]
    assert commit.list_steps(folder) == [2]
    commit.remove_leftovers(folder)
    assert store_of(folder).folders(folder) == ["step-2"]


def test_a_folder_that_cannot_be_listed_is_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds nothing and what cannot be looked into are not the same: nothing is begun anew, nothing deleted."""
    make(folder, 5)
    monkeypatch.setattr(store_of(folder), "folders", refuse)
    with pytest.raises(CheckpointError, match=f"^{folder} cannot be listed: disk on fire$"):
        commit.list_steps(folder)
    said: list[str] = []
    monkeypatch.setattr(commit.logger, "warning", lambda text, *values: said.append(text % values))
    commit.retain(folder, 1, 0)
    assert said == [f"no old checkpoint is deleted: {folder} cannot be listed: disk on fire"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    (path / "a.distcp").chmod(0)
    assert commit.find_damage(path, hashes=True) == [f"{path / 'a.distcp'} cannot be read (Permission denied)"]


def test_what_the_driver_raises_is_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(folder, 5, {"a": b"abc"})

    def fail(path: Folder) -> None:
        raise RuntimeError("403")  # no OSError: drivers have errors of their own

    monkeypatch.setattr(store_of(folder), "measure", fail)
    assert commit.find_damage(path, hashes=True) == [f"{path / 'a'} cannot be read (403)"]


def test_a_checkpoint_is_moved_whole(folder: Folder) -> None:
    store, path = store_of(folder), make(folder, 5)
    target = folder / "previous-1" / "step-5"
    store.move(path, target)
    assert commit.list_steps(folder) == [] and commit.list_steps(folder / "previous-1") == [5]
    assert commit.find_damage(target, hashes=True) == []
    assert {name: (target / name).read_bytes() for name in CONTENTS} == CONTENTS


def test_errors_are_for_users() -> None:
    assert issubclass(DamagedError, CheckpointError) and CheckpointError.exit_code == 1
