"""Kill -9 at random moments: whatever is killed whenever, the next launch goes on, and in the end the run is the one
that was never stopped, bit by bit.
"""

import random
import signal
import time
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import ranks
from tests.checkpoint.test_two_processes import exact, train
from tests.tiny_run import arguments, write_corpus
from titan_like.checkpoint import commit

STEPS = 100
SETTINGS: dict[str, Any] = {
    "training__steps": STEPS, "checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__resume": "auto",
    "comm__init_timeout_seconds": 10,  # for one whose peer is killed before it has joined
}  # fmt: skip
pytestmark = pytest.mark.distributed


class Killer:
    """Launches, kills and launches again, until the run has come to its end after `kills` kills."""

    def __init__(self, folder: Path, seed: int, longest: float) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.longest = longest  # seconds that a launch lives at most before the next save is waited for
        self.kills = self.while_saving = 0

    def kill_one_run(self, name: str, mode: str, kills: int) -> Path:
        """One run that is killed up to `kills` times, fewer if it is faster; returns its folder."""
        run, out = self.folder / name, self.folder / "out"
        for _ in range(kills):
            seen = commit.list_steps(run / "checkpoint")
            processes = ranks.start(2, train, arguments(run, **SETTINGS, checkpoint__async_mode=mode), output=out)
            if not self._kill(processes, run / "checkpoint"):
                break
            left = commit.list_steps(run / "checkpoint")
            assert not seen or left, "a kill has cost the last checkpoint"
            for step in left:
                assert commit.find_damage(commit.step_folder(run / "checkpoint", step), hashes=True) == []
        argv = arguments(run, **SETTINGS, checkpoint__async_mode=mode)
        assert ranks.run(2, train, argv, output=out) == [0, 0], ranks.said(out)
        assert not list((run / "checkpoint").glob("*.tmp"))
        return run

    def _kill(self, processes: list[BaseProcess], folder: Path) -> bool:
        """Wait for the moment and kill one rank or both; false if they had already finished."""
        self._wait_for_the_moment(processes, folder)
        saving = any(folder.glob("step-*.tmp"))
        alive = [process for process in processes if process.exitcode is None]
        victims = alive if self.random.random() < 0.5 else alive[:1] if self.random.random() < 0.5 else alive[-1:]
        for process in victims:
            process.kill()
        codes = ranks.wait(processes, timeout=60)  # who is left notices
        if codes == [0, 0]:
            return False
        assert -signal.SIGKILL in codes
        self.kills += 1
        self.while_saving += saving
        return True

    def _wait_for_the_moment(self, processes: list[BaseProcess], folder: Path) -> None:
        """Any moment of a launch, or for three of four one that is near a save."""
        deadline = time.monotonic() + self.longest * self.random.random()
        near_a_save, delay = self.random.random() < 0.75, self.random.random() * 0.05
        while time.monotonic() < deadline:
            time.sleep(0.001)
        while near_a_save and not any(folder.glob("step-*.tmp")):
            if any(process.exitcode is not None for process in processes):
                return
            time.sleep(0.0005)
        time.sleep(delay)


def kill(folder: Path, wanted: int, per_run: int) -> Killer:
    """Run after run, until `wanted` launches have been killed."""
    write_corpus(folder / "train")
    straight = folder / "straight"
    started = time.monotonic()
    assert ranks.run(2, train, arguments(straight, **SETTINGS), output=folder / "out") == [0, 0]
    killer = Killer(folder, seed=0, longest=0.35 * (time.monotonic() - started))
    expected = exact(straight)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    for number in count():
        if killer.kills >= wanted:
            break
        run = killer.kill_one_run(f"run-{number}", ("disabled", "thread")[number % 2], per_run)
        assert exact(run) == expected
    print(f"{killer.kills} kills, {killer.while_saving} of them while saving")
    return killer


@pytest.mark.timeout(280)
def test_six_kills(tmp_path: Path) -> None:
    killer = kill(tmp_path, wanted=6, per_run=3)
    assert killer.while_saving >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path: Path) -> None:
    killer = kill(tmp_path, wanted=50, per_run=10)
    assert killer.while_saving >= 20
