"""Real launchers: a run that torchrun starts again goes on by itself, one that is asked to stop leaves with 75."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny_run import arguments, logged, run, write_corpus
from titan_like.checkpoint import manager

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


class Job:
    """A launcher, whose output goes to a file: nobody reads it while it runs."""

    def __init__(self, command: list[str], output: Path, **env: str) -> None:
        common = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "NPROC": "2", "PYTHON": sys.executable}
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(command, env={**common, **env}, cwd=REPO, stdout=file, stderr=file)

    def end(self, timeout: float) -> tuple[int, str]:
        """(exit code, what it said); killed if it does not end in time."""
        try:
            return self.process.wait(timeout), self._output.read_text()
        finally:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            self.process.wait()


def test_torchrun_s_restart_goes_on_with_the_last_checkpoint(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    settings = {"training__steps": 8, "checkpoint__enable": True, "checkpoint__interval": 2}
    run(tmp_path / "run", until=2, **settings)  # an older run in the same folder, which resume=never sets aside
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["--max-restarts", "1", "-m", "tests.checkpoint.dies_once"]
    job = Job([*torchrun, *worker, *arguments(tmp_path / "run", **settings)], tmp_path / "out")
    code, said = job.end(timeout=240)
    assert code == 0, said
    assert f"resumed from {tmp_path}/run/checkpoint/step-4" in said
    assert [line["step"] for line in logged(tmp_path / "run")] == list(range(1, 9))
    assert manager.list_steps(tmp_path / "run" / "previous-1" / "checkpoint") == [2]


@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_launcher_passes_a_stop_on_and_gives_back_75(tmp_path: Path, name: str) -> None:  # R163, R167
    write_corpus(tmp_path / "train")
    settings = {"training__steps": 10**6, "checkpoint__enable": True, "checkpoint__interval": 10**6}
    command = [str(REPO / "run_train.sh")] if name == "SIGUSR1" else [sys.executable, "-m", "titan_like.torchrun"]
    configured = ["--job.config_file", str(tmp_path / "empty.toml"), *arguments(tmp_path / "run", **settings)]
    (tmp_path / "empty.toml").write_text("")
    job = Job([*command, *configured], tmp_path / "out")
    deadline = time.monotonic() + 200
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(logged(tmp_path / "run")) < 3:
        assert job.process.poll() is None and time.monotonic() < deadline, job.end(timeout=0)
        time.sleep(0.1)
    asked = time.monotonic()
    job.process.send_signal(getattr(signal, name))
    code, said = job.end(timeout=60)
    assert code == 75, said[-3000:]
    assert time.monotonic() - asked < 30
    last = logged(tmp_path / "run")[-1]["step"]
    assert manager.list_steps(tmp_path / "run" / "checkpoint") == [last]  # a whole step
    assert f"stopped after step {last} of 1000000" in said and "Traceback" not in said
