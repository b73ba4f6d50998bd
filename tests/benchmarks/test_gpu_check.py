"""The GPU check, on the CPU: the same program at toy size."""

import errno
import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu_check import CASES, Check, main, table
from titan_like.config import load_config
from titan_like.launch import check_settings


@pytest.mark.timeout(300)
def test_a_dry_run_compares_measures_and_forecasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "dry.json"
    main(["--dry", "--only=1B eager, 2 micro-batches", f"--output={output}"])
    found = json.loads(output.read_text())
    assert found["dry"] and found["correctness"]["worst_relative_difference"] == 0.0
    assert len(found["correctness"]["cpu"]) == 10
    (case,) = found["cases"].values()
    assert case["tokens_per_s"] > 0 and case["allocated_gib"] is None and case["forecast_allocated_gib"] > 0
    assert "1B eager, 2 micro-batches" in capsys.readouterr().out.splitlines()[-2]


def test_what_no_time_is_left_for_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.correctness", lambda check: {"ok": True})
    main(["--dry", "--limit=0", f"--output={tmp_path / 'x.json'}"])
    cases = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert cases == dict.fromkeys(CASES, "not run: no time")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dry", "--output=/dev/full"], "--output /dev/full is no file"),
        (["--dry", "--output=file/new/x.json"], '"file/new", but nothing can be written to'),
        (["--dry", "--output=/proc/new/x.json"], '"/proc/new", but nothing can be written to'),
        (["--dry", "--only=nosuch"], "'nosuch' is in the name of no case; there are: 1B compiled; 1B eager; "),
        (["--dry", "--limit=nan"], "'nan' is not a number from 0 to 1,000,000"),
        ([], "torch sees no GPU here"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_runs(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("benchmarks.gpu_check.correctness", None)  # would fail if it were used
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_table_is_printed_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        assert path == Path("outputs/gpu_check_dry.json")  # a dry run leaves a real result alone
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.gpu_check.correctness", lambda check: {"ok": True})
    monkeypatch.setattr("benchmarks.gpu_check.replace_text", full)
    with pytest.raises(SystemExit) as caught:
        main(["--dry", "--limit=0"])
    told = capsys.readouterr()
    assert caught.value.code == 2 and told.out.splitlines()[-1].split()[:2] == ["1B", "compiled,"]
    assert told.err == "error: outputs/gpu_check_dry.json could not be written (No space left on device)\n"


@pytest.mark.parametrize("dry", [True, False])
def test_every_case_is_a_run_that_the_trainer_accepts(tmp_path: Path, dry: bool) -> None:
    (tmp_path / "train.idx").touch()
    for name in CASES:
        config = load_config(Check(tmp_path, dry).settings(name, 12))
        fake = config.model_copy(update={"comm": config.comm.model_copy(update={"mode": "fake"})})
        assert check_settings(fake, 1) == [], name
        assert config.model.flavor == ("debug" if dry else name[:2])


def test_the_table_shows_shares_of_the_matrix_rate() -> None:
    case = {
        "tokens_per_s": 50_000.0, "tflops": 400.0, "mfu": 0.4, "first_step_s": 30.0, "allocated_gib": 41.5,
        "reserved_gib": 44.0, "forecast_allocated_gib": 41.0, "forecast_reserved_gib": 43.0,
    }  # fmt: skip
    found = {
        "environment": {"device": "H200", "torch": "2.13.0"},
        "matrix_tflops": 800.0,
        "correctness": {"ok": True, "worst_relative_difference": 1e-6},
        "cases": {"1B compiled": case, "3B eager": "failed: out of memory"},
    }
    lines = table(found)
    assert lines[-2].split() == ["1B", "compiled", "50,000", "400.0", "50.0%", "41.50", "41.00", "44.00"]
    assert lines[-1].endswith("failed: out of memory")
