"""What makes a folder a checkpoint, and what is noticed when it is not what was written."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_like.checkpoint import commit
from titan_like.checkpoint.commit import CheckpointError, DamagedError
from titan_like.config.errors import ConfigError

CONTENTS = {"a.distcp": b"abc" * 1000, "record.json": b'{"step": 5}', ".metadata": b"\x80\x04", "empty": b""}


def make(folder: Path, step: int, contents: dict[str, bytes] = CONTENTS) -> Path:
    partial, final = folder / f"step-{step}.tmp", folder / f"step-{step}"
    partial.mkdir(parents=True)
    for name, content in contents.items():
        (partial / name).write_bytes(content)
    commit.commit(partial, final, step, {name: commit.measure(partial / name) for name in contents})
    return final


def test_the_manifest_holds_what_was_written(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    files = commit.read_manifest(path)
    assert files["a.distcp"] == {"size": 3000, "sha256": hashlib.sha256(b"abc" * 1000).hexdigest()}
    assert files["empty"] == {"size": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    assert files.keys() == CONTENTS.keys() and not (tmp_path / "step-5.tmp").exists()
    (path / "notes.txt").write_text("the user's own")
    assert commit.find_damage(path, hashes=True) == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    """For the file of the same name in another checkpoint, of the same length."""
    shutil.copy(path.parent.parent / "step-6" / path.name, path)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, swap])
@pytest.mark.parametrize("name", ["a.distcp", "record.json", ".metadata", "manifest.json"])
def test_every_damage_of_every_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = make(tmp_path, 5)
    make(tmp_path, 6, {name: content[::-1] for name, content in CONTENTS.items()})
    damage(path / name)
    (problem,) = commit.find_damage(path, hashes=True)
    assert str(path) in problem
    assert name in problem or (damage is swap and "holds the checkpoint of step 6" in problem)
    if name != "manifest.json":  # without hashes sizes are still compared
        assert bool(commit.find_damage(path, hashes=False)) == (damage in (truncate, Path.unlink))


def test_no_byte_of_the_manifest_can_change_unnoticed(tmp_path: Path) -> None:
    path = make(tmp_path, 5) / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (1, 0x20):  # the second changes upper to lower case
            changed = bytearray(whole)
            changed[position] ^= bit
            path.write_bytes(bytes(changed))
            assert commit.find_damage(path.parent, hashes=False), (position, bit)


def test_a_folder_under_another_step_s_name_is_damaged(tmp_path: Path) -> None:
    make(tmp_path, 5).rename(tmp_path / "step-7")
    with pytest.raises(DamagedError, match="step-7 holds the checkpoint of step 5"):
        commit.read_manifest(tmp_path / "step-7")


def test_the_files_are_shared_out_and_none_is_left_out(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    for name in CONTENTS:
        (path / name).unlink()
    parts = [commit.find_damage(path, hashes=True, part=part, parts=3) for part in range(3)]
    assert [len(problems) for problems in parts] == [2, 1, 1]
    assert sorted(problem for problems in parts for problem in problems) == sorted(
        f"{path / name} is missing" for name in CONTENTS
    )


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    content = {"format": 9, "step": 5, "files": {}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "digest": digest}))
    with pytest.raises(ConfigError, match="format 9, this version reads 2; use the version"):
        commit.read_manifest(path)


def test_what_a_rank_wrote_elsewhere_is_not_committed(tmp_path: Path) -> None:
    partial = tmp_path / "step-5.tmp"
    partial.mkdir()
    with pytest.raises(OSError, match=r"__1_0.distcp is not what a rank wrote; all nodes must share the folder"):
        commit.commit(partial, tmp_path / "step-5", 5, {"__1_0.distcp": {"size": 3, "sha256": ""}})
    assert commit.list_steps(tmp_path) == []


def test_only_committed_checkpoints_are_listed(tmp_path: Path) -> None:  # R073
    for step in (12, 5):
        make(tmp_path, step)
    shutil.copytree(tmp_path / "step-5", tmp_path / "step-20.tmp")
    for name in ("step-old", "notes", "step-7", "step-05"):
        (tmp_path / name).mkdir()
    shutil.copy(tmp_path / "step-5" / "manifest.json", tmp_path / "step-05")
    (tmp_path / "step-9").write_text("a file")
    assert commit.list_steps(tmp_path) == [5, 12] and commit.uncommitted_steps(tmp_path) == [7]
    assert commit.list_steps(tmp_path / "missing") == []


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 5)
    for name in ("step-6.tmp", "step-old.tmp", "notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "step-7.tmp").write_text("a file")
    commit.remove_leftovers(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-5", "step-old.tmp", "notes.tmp", "step-7.tmp"}
    commit.remove_leftovers(tmp_path / "missing")


def test_retention_leaves_all_else_alone(tmp_path: Path) -> None:  # R073
    for step in (1, 2, 4, 8, 10, 9):
        make(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-3").mkdir()  # not committed: neither counted nor deleted
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old" / "mine.txt").write_text("keep")
    commit.retain(tmp_path, 0, 0)
    assert commit.list_steps(tmp_path) == [1, 2, 4, 8, 9, 10]
    commit.retain(tmp_path, 2, 4)
    assert commit.list_steps(tmp_path) == [4, 8, 9, 10]
    commit.retain(tmp_path, 1, 0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-10", "step-3", "step-old"]
    assert (tmp_path / "step-old" / "mine.txt").read_text() == "keep"
    commit.retain(tmp_path / "missing", 2, 0)


def test_what_cannot_be_deleted_warns_and_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # R073
    make(tmp_path, 1)
    make(tmp_path, 2)

    def refuse(path: Path) -> None:
        raise OSError("disk on fire")

    said: list[str] = []
    monkeypatch.setattr(commit.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(commit.shutil, "rmtree", refuse)
    commit.retain(tmp_path, 1, 0)
    assert said == ["the old checkpoint of step 1 could not be deleted: disk on fire"]
    assert commit.list_steps(tmp_path) == [2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    (path / "a.distcp").chmod(0)
    assert commit.find_damage(path, hashes=True) == [f"{path / 'a.distcp'} cannot be read (Permission denied)"]


def test_errors_are_for_users() -> None:
    assert issubclass(DamagedError, CheckpointError) and CheckpointError.exit_code == 1
