"""Traces and snapshots at chosen steps: which files are written, and what is in them."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction

from tests.tiny_run import arguments, config, run, write_corpus
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Profiling
from titan_like.launch import check_settings
from titan_like.observe.profiling import Profiler, action, free_path

CPU = torch.device("cpu")
ON = {"profiling.enable_profiling": "true", "profiling.profile_freq": 3, "profiling.profiler_warmup": 1}


def events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]


def test_a_run_writes_traces_of_the_chosen_steps_with_named_ranges(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    settings = {**ON, "validation.interval": 3, "data.validation": tmp_path / "train", "validation.samples": 2}
    run(tmp_path / "run", **settings, **{"training.steps": 7, "training.global_batch_size": 4})
    traces = tmp_path / "run" / "profile_traces"
    assert sorted(p.name for p in traces.iterdir()) == ["step-3-rank-0.json.gz", "step-6-rank-0.json.gz"]
    marked = [e["name"] for e in events(traces / "step-6-rank-0.json.gz") if e.get("cat") == "user_annotation"]
    assert sum(name.startswith("ProfilerStep#") for name in marked) == 1
    # Two micro-batches; two collectives of the step and one of the validation's.
    expected = {"data": 1, "forward": 2, "backward": 2, "collectives": 2, "clip": 1, "optimizer": 1, "validation": 1}
    assert {name: marked.count(name) for name in expected} == expected


def test_an_older_trace_stays(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    for expected in (["step-3-rank-0.json.gz"], ["step-3-rank-0-2.json.gz", "step-3-rank-0.json.gz"]):
        run(tmp_path / "run", **ON, **{"training.steps": 3, "profiling.save_traces_folder": tmp_path / "traces"})
        assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == expected


def test_free_names(tmp_path: Path) -> None:
    assert free_path(tmp_path, "a", ".x").name == "a.x"
    for name in ("a.x", "a-2.x"):
        (tmp_path / name).touch()
    assert free_path(tmp_path, "a", ".x").name == "a-3.x"


def test_the_schedule_follows_the_global_step() -> None:
    """Freq 10, 2 steps recorded after 3 of warm-up: 6, 7 and 8 warm up, 9 and 10 are in the trace."""
    settings = Profiling(enable_profiling=True, profile_freq=10, profiler_active=2, profiler_warmup=3)
    none, warm, record, save = (
        ProfilerAction.NONE, ProfilerAction.WARMUP, ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE
    )  # fmt: skip
    expected = [none] * 5 + [warm] * 3 + [record, save]
    assert [action(step, settings) for step in range(1, 21)] == expected * 2


def steps(settings: Profiling, folder: Path, first: int, last: int, rank: int = 0) -> list[str]:
    with Profiler(settings, folder, CPU, rank, first) as profiler:
        for _ in range(first, last + 1):
            torch.ones(2) + 1
            profiler.end_step()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json.gz"))


def test_what_is_recorded_when_a_run_begins_or_ends_within_a_period(tmp_path: Path) -> None:
    settings = Profiling(enable_profiling=True, profile_freq=4, profiler_active=2, profiler_warmup=1)
    # Resumed at step 4, the second half of the trace; ended after step 7, the first half of the next one.
    assert steps(settings, tmp_path / "a", 4, 7) == [f"profile_traces/step-{n}-rank-0.json.gz" for n in (4, 7)]
    assert steps(settings, tmp_path / "b", 1, 6) == ["profile_traces/step-4-rank-0.json.gz"]


def test_only_chosen_ranks_write(tmp_path: Path) -> None:
    settings = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0, profiler_ranks=(1, 3))
    assert steps(settings, tmp_path, 1, 2, rank=0) == []
    assert steps(settings, tmp_path, 1, 2, rank=3) == ["profile_traces/step-2-rank-3.json.gz"]


def test_off_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_like.observe.profiling.profile", None)  # would fail if it were used
    assert steps(Profiling(), tmp_path, 1, 20) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0)
    with Profiler(settings, tmp_path, CPU, 0, 1) as profiler:
        (tmp_path / "profile_traces").rmdir()
        for _ in range(3):
            profiler.end_step()
    assert "step-2-rank-0.json.gz could not be written" in caplog.text


@pytest.mark.parametrize("fails", ["tempfile", "copy"])
def test_a_trace_that_was_cut_is_not_left(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk of temporary files is full, then the one of the run."""
    settings, temporary = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=0), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def cut(trace: Any, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"na' + 100 * " ")

    def full(source: Any, target: Any) -> None:
        target.write(source.read(100))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fails == "tempfile":
        monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", cut)
    else:
        monkeypatch.setattr("shutil.copyfileobj", full)
    assert steps(settings, tmp_path, 1, 2) == []
    assert "step-2-rank-0.json.gz could not be written: " in caplog.text
    assert not list((tmp_path / "profile_traces").iterdir()) and not list(temporary.iterdir())


def test_snapshots_at_the_same_steps_and_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.memory is stood in for: this machine may have no GPU."""
    recording: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: recording.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    settings = Profiling(enable_memory_snapshot=True, profile_freq=2)
    with (
        pytest.raises(torch.OutOfMemoryError),
        Profiler(settings, tmp_path, torch.device("cuda"), 1, first_step=1) as profiler,
    ):
        for _ in range(3):
            profiler.end_step()
        raise torch.OutOfMemoryError("full")
    names = sorted(path.name for path in (tmp_path / "memory_snapshot").iterdir())
    assert names == ["step-2-rank-1.pickle", "step-4-out-of-memory-rank-1.pickle"]
    assert recording == [{"max_entries": 1_000_000}, {"enabled": None}]


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    taken = tmp_path / "file"
    taken.touch()
    (problem,) = check_settings(config(tmp_path / "run", **ON, **{"profiling.save_traces_folder": taken / "x"}), 1)
    assert problem.startswith(f'profiling.save_traces_folder is "{taken}/x", but nothing can be written to')
    assert not os.path.lexists(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profiling.profiler_active": 2}, "profiling.profiler_active (2) has no effect without"),
        ({"profiling.profile_freq": 5}, "without profiling.enable_profiling or profiling.enable_memory_snapshot"),
        (
            {**ON, "profiling.profiler_warmup": 3},
            "(3) + profiling.profiler_active (1) exceed profiling.profile_freq (3)",
        ),
        ({**ON, "profiling.profile_freq": 7}, "profiling.profile_freq (7) is beyond training.steps (6)"),
        ({**ON, "profiling.save_traces_folder": "x/../../y"}, '"x/../../y", which is outside job.dump_folder'),
        (
            {**ON, "profiling.save_memory_snapshot_folder": "x"},
            "has no effect without profiling.enable_memory_snapshot",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments(tmp_path / "run", **settings))
    (problem,) = caught.value.problems
    assert words in problem
