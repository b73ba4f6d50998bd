"""Files on a disk that is full for a time: /dev/full, and files that take a part only."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tiny_run import losses, run, write_corpus
from titan_like.observe import appended
from titan_like.observe.appended import AppendedFile, StepLog, replace_text
from titan_like.observe.metrics import MetricsWriter


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `size` bytes: a write takes a part, the next one fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_does_not_fit_is_written_when_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = AppendedFile(tmp_path / "x")
    with room_for(10):
        for number in range(1, 5):
            file.write(b"record %d\n" % number)  # 9 bytes: the second one is cut
        assert (tmp_path / "x").read_bytes() == b"record 1\nr"
    assert [record.message.partition(": ")[0] for record in caplog.records] == [f"{tmp_path}/x could not be written"]
    file.write(b"record 5\n")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"".join(b"record %d\n" % number for number in range(1, 6))
    assert [record.message for record in caplog.records[1:]] == [
        f"{tmp_path}/x can be written again; nothing is missing"
    ]


def test_beyond_a_limit_whole_records_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(appended, "MOST_WAITING_BYTES", 6)
    file = AppendedFile(tmp_path / "x")
    with room_for(2):
        for record in (b"aaaa\n", b"bbbb\n", b"cccc\n", b"dddd\n"):  # 3 and then 8 bytes wait
            file.write(record)
    file.write(b"")
    assert (tmp_path / "x").read_bytes() == b"aaaa\nbbbb\n"
    assert caplog.records[-1].message.endswith("can be written again; 10 bytes are missing")
    file.close()


def test_what_could_never_be_written_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    file = AppendedFile(Path("/dev/full"))
    file.write(b"four")
    file.write(b"more")
    file.close()
    first, last = [record.message for record in caplog.records]
    assert first.startswith("/dev/full could not be written: No space left on device")
    assert last == "/dev/full lacks 8 bytes that could not be written"


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 10)))
    before = path.read_text()
    with room_for(4):
        with pytest.raises(OSError):
            StepLog(path, start_step=5)
        with pytest.raises(OSError):
            replace_text(path, "a longer text")
    assert path.read_text() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_metrics_and_tensorboard_are_whole_after_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = MetricsWriter(tmp_path, start_step=0, enable_tensorboard=True)
    with room_for(110):
        for step in range(1, 6):
            writer.write({"step": step, "loss": float(step)})
    assert sorted(Path(record.args[0]).name[:7] for record in caplog.records) == ["events.", "metrics"]
    writer.write({"step": 6, "loss": 6.0})
    writer.close()
    expected = [(step, float(step)) for step in range(1, 7)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == expected
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == expected
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_whose_logs_cannot_be_written_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up after the start; checkpoints lie on another one."""
    write_corpus(tmp_path / "train")
    opened = AppendedFile.__init__

    def on_a_full_disk(file: AppendedFile, path: Path) -> None:
        opened(file, Path("/dev/full"))

    monkeypatch.setattr(AppendedFile, "__init__", on_a_full_disk)
    settings = {"metrics.log_sample_ids": "true", "metrics.enable_tensorboard": "true", "checkpoint.interval": 2}
    trainer = run(tmp_path / "run", checkpoint__enable=True, **settings)
    assert trainer.counters.step == 6 and (tmp_path / "run" / "checkpoint" / "step-6" / "record.json").is_file()
    out = capsys.readouterr().out
    assert out.count("/dev/full could not be written") == 3 and out.count("step 6/6") == 1
    monkeypatch.setattr(AppendedFile, "__init__", opened)
    run(tmp_path / "run", checkpoint__enable=True, checkpoint__resume=4, **settings)
    assert list(losses(tmp_path / "run")) == [5, 6]
