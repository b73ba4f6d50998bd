import json
import math
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_like.observe.metrics import MetricsWriter, ProgressBar, Stopwatch, console_line, duration


def write(folder: Path, steps: range, *, start_step: int, offset: float = 0.0, tensorboard: bool = False) -> None:
    writer = MetricsWriter(folder, start_step=start_step, enable_tensorboard=tensorboard)
    for step in steps:
        writer.write({"step": step, "loss": step + offset, "mfu": None})
    writer.close()


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_object_per_step_at_full_precision(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "new" / "folder", start_step=0, enable_tensorboard=False)
    values = {"step": 1, "loss": 0.1 + 0.2, "mfu": None, "valid_labels": 2**53 + 1}
    writer.write(values)
    assert read(tmp_path / "new" / "folder") == [values]  # already there, before it is closed
    writer.close()


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, start_step=0, enable_tensorboard=False)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    writer.close()
    assert read(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:  # R156
    write(tmp_path, range(1, 7), start_step=0, tensorboard=True)
    write(tmp_path, range(5, 9), start_step=4, offset=0.5, tensorboard=True)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5), (7, 7.5), (8, 8.5)]
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == expected
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == expected
    assert board.Tags()["scalars"] == ["loss"]  # no made-up MFU


def test_tensorboard_has_what_was_written_before_a_kill(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, start_step=0, enable_tensorboard=True)
    writer.write({"step": 1, "loss": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    writer.close()
    assert [(event.step, event.value) for event in events] == [(1, 2.0)]


def test_lines_that_a_kill_has_cut_are_dropped(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 1.0}', '{"step": 2, "los', "[1]", "3", '{"loss": 4.0}', "", '{"step": 3, "loss": 3.0']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write(tmp_path, range(3, 4), start_step=2)
    assert read(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 3.0, "mfu": None}]


def test_a_last_line_without_its_end_is_not_joined_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}')
    write(tmp_path, range(2, 3), start_step=1)
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


VALUES = {
    "step": 7, "loss": 3.14159, "grad_norm": 0.98765, "lr": 3e-4, "processed_positions": 1, "valid_labels": 1,
    "tokens_per_s": 12345.6, "mfu": None, "data_wait": 0.0123, "memory_gib/rss": 1.234,
}  # fmt: skip


def test_console_line() -> None:
    assert console_line(VALUES, total_steps=100, seconds_left=3723) == (
        "step   7/100  loss 3.1416  grad norm 0.988  lr 3.00e-04  12,346 tokens/s/device  mfu n/a  rss 1.23 GiB  "
        "data wait 1.2%  left 1h 02m"
    )
    gpu = {**VALUES, "mfu": 0.4567, "memory_gib/active": 10.0, "memory_gib/reserved": 20.5}
    del gpu["memory_gib/rss"]
    assert "mfu 45.7%  active 10.00 GiB reserved 20.50 GiB  data" in console_line(gpu, 7, 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (12.4, "12s"), (59.6, "1m 00s"), (200, "3m 20s"), (3600, "1h 00m"), (90061, "25h 01m")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] += 10
    watch.add_wait(1.0)
    watch.add_wait(0.5)
    watch.leave_out(4.0)  # a validation in the middle
    now[0] += 2
    assert watch.read() == (8.0, 1.5)
    now[0] += 3
    assert watch.read() == (3.0, 0.0)


def test_progress_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ProgressBar(4, enabled=True).draw(1, "loss 1.0")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = ProgressBar(4, enabled=True)
    bar.draw(1, "loss 1.0")
    bar.clear()
    assert capsys.readouterr().out == f"\r\x1b[K[{'#' * 7}{'.' * 23}] 1/4 loss 1.0\r\x1b[K"
    ProgressBar(4, enabled=False).draw(1, "loss 1.0")
    assert capsys.readouterr().out == ""
