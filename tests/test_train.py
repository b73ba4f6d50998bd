"""The entry point that every rank runs: what it says and how it ends."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import arguments, losses, write_corpus
from titan_like import train
from titan_like.checkpoint.manager import CheckpointError
from titan_like.parallel.distributed import close_process_group
from titan_like.recovery import Counters, Recovery
from titan_like.trainer import Trainer

REPO = Path(__file__).resolve().parents[1]


class Left(BaseException):
    """In place of os._exit, which would end the tests."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(train.os, "_exit", leave)
    monkeypatch.delenv("RANK", raising=False)
    write_corpus(tmp_path / "train")
    yield tmp_path
    close_process_group()


def failing(argv: list[str]) -> int:
    with pytest.raises((Left, SystemExit)) as caught:
        train.main(argv)
    return int(caught.value.args[0])


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    command = [sys.executable, "-m", "titan_like.train", *arguments(tmp_path / "run", checkpoint__enable=True)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 6/6  loss " in done.stdout
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "checkpoint" / "step-6" / "record.json").is_file()


def test_config_errors_come_without_torch_and_without_a_traceback(tmp_path: Path) -> None:
    code = "import sys; from titan_like.train import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "--training.stesp", "5", "--training.seq_len", "none"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "unknown key training.stesp on the command line; did you mean training.steps?" in done.stderr
    assert "training.seq_len is none" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model__flavor": "9B"}, 'model.flavor is "9B"; llama3 has debug'),
        ({"training__seq_len": 65}, "training.seq_len (65) is longer than the 64 tokens"),
        ({"data__train": "nowhere/at/all"}, "cannot read nowhere/at/all.idx"),
        ({"parallelism__data_parallel_shard_degree": 2}, "does not equal the world size (1)"),
        ({"checkpoint__enable": True, "checkpoint__resume": 7}, "checkpoint.resume is 7, but"),
    ],
)
def test_what_cannot_run_as_asked_is_exit_code_2(
    folder: Path, settings: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(arguments(folder / "run", **settings)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and sentence in errors and "Traceback" not in errors
    assert len(errors.splitlines()) == 1
    assert not (folder / "run").exists()


def test_an_unwritable_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R079."""
    (folder / "file").write_text("")
    argv = arguments(folder / "file" / "run", data__train=folder / "train")
    assert failing(argv) == 2
    assert "nothing can be written to" in capsys.readouterr().err


def test_a_full_disk_is_told_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("titan_like.recovery.replace_text", full)
    assert failing(arguments(folder / "run")) == 2
    assert capsys.readouterr().err == (
        f'error: job.dump_folder is "{folder}/run", but it cannot be written (No space left on device); '
        "make room there or choose another folder\n"
    )


def test_a_failure_while_running_is_exit_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(recovery: Recovery, counters: Counters, *, must: bool) -> None:
        raise CheckpointError("the disk is full; make room\nand again")

    monkeypatch.setattr(Recovery, "save", full)
    assert failing(arguments(folder / "run", checkpoint__enable=True)) == 1
    assert capsys.readouterr().err == "error: the disk is full; make room\nerror: and again\n"


def test_a_defect_shows_its_traceback_and_the_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(trainer: Trainer) -> None:
        monkeypatch.setenv("RANK", "3")
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Trainer, "fit", broken)
    assert failing(arguments(folder / "run")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 3] Traceback (most recent call last):"
    assert lines[-1] == "[rank 3] ZeroDivisionError: a defect"


BROKEN_ON_RANK_1 = """
import os
from titan_like import train
from titan_like.data.dataset import TokenDataset

read = TokenDataset.__getitem__
def broken(self, k):
    if os.environ["RANK"] == "1" and k >= 8:  # four samples per step: the third step begins at sample 8
        raise ValueError(f"sample {k} is broken")
    return read(self, k)
TokenDataset.__getitem__ = broken
train.main()
"""


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_one_rank_that_fails_ends_all_and_has_the_last_word(tmp_path: Path) -> None:  # R169
    write_corpus(tmp_path / "train")
    (tmp_path / "worker.py").write_text(BROKEN_ON_RANK_1)
    argv = arguments(tmp_path / "run", training__local_batch_size=2)
    code = f"import os, sys; from titan_like.torchrun import main; sys.exit(main({argv!r}, os.environ, 'worker'))"
    env = {
        **os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "NPROC": "2",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("[rank 1] ValueError: sample 10 is broken"), done.stderr
    assert "Rank 1 failed first" in done.stderr
    assert list(losses(tmp_path / "run")) == [1, 2]
