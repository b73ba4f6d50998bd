"""scripts/plot_loss.py on a log of a few lines."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("plot_loss", Path(__file__).parents[2] / "scripts" / "plot_loss.py")
assert spec and spec.loader
plot_loss = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plot_loss)

LINES = [
    {"step": 1, "loss": 8.5, "lr": 0.1},
    {"step": 10, "loss": None, "lr": 0.1},
    {"step": 10, "validation_loss": 6.0, "validation_labels": 7},
    {"step": 20, "loss": 4.0, "lr": 0.1},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def test_training_and_validation_are_told_apart(run: Path) -> None:
    curves = plot_loss.read(run / "metrics.jsonl")
    steps, losses = curves["loss"]
    assert steps == [1, 10, 20] and losses[0] == 8.5 and math.isnan(losses[1]) and losses[2] == 4.0
    assert curves["validation_loss"] == ([10], [6.0])


def test_it_writes_a_png(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the dev extra")
    picture = tmp_path / "new" / "loss.png"
    assert plot_loss.main([str(run), "--output", str(picture), "--baseline", "6.3"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the dev extra")
    for output, reason in (("/dev/full", "No space left on device"), (tmp_path, "Is a directory")):
        assert plot_loss.main([str(run), "--output", str(output)]) == 2
        assert capsys.readouterr().err == f"error: {output} could not be written ({reason}); name another --output\n"


def test_runs_without_a_loss_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_loss.main([str(run / "absent")]) == 2
    (run / "metrics.jsonl").write_text("")
    assert plot_loss.main([str(run)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "No such file" in first and "holds no loss" in second
