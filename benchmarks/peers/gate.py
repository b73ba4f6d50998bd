"""What a contender is told, and how it takes turns with the others. Needs no more than Python, numpy and torch."""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np


class NotRunnable(Exception):
    """Why a contender cannot take part, for the table."""


@dataclass(frozen=True)
class Task:
    """One contender's run.

    Attributes:
        shape: dim, n_layers, n_heads, ffn_dim, vocab_size.
        batch: rows of an optimizer step over all processes.
        warmup: steps before the first turn, at least 1.
        turn, turns: steps of a turn, number of turns.
        corpus: prefix of the shards, for titan_like.
        rows: .npy of (warmup + turn x turns) x batch rows, each seq_len + 1 tokens, in the order that all train on.
        folder: for what a trainer writes.
    """

    contender: str
    shape: dict[str, int]
    seq_len: int
    batch: int
    warmup: int
    turn: int
    turns: int
    processes: int
    compiled: bool
    packed: bool
    lr: float
    corpus: str
    rows: str
    folder: str

    @property
    def steps(self) -> int:
        return self.warmup + self.turn * self.turns

    @property
    def local_batch(self) -> int:
        return self.batch // self.processes

    def batches(self, rank: int) -> list[np.ndarray]:
        """Of each step this rank's (local_batch, seq_len + 1) int64 tokens."""
        rows = np.load(self.rows).reshape(self.steps, self.batch, -1)
        return list(rows[:, rank * self.local_batch : (rank + 1) * self.local_batch])


class Gate:
    """Stands between the steps of a training: holds it up until the benchmark says go, and measures the turns.

    `next` is to be called where a step begins, `finish` after the last one. Messages to the benchmark are lines of
    JSON; CPU seconds are those of all threads of this process.
    """

    def __init__(self, task: Task, channel: TextIO) -> None:
        self._task, self._channel = task, channel
        self._begun = 0  # steps
        self._since: float | None = None  # CPU seconds when the turn began

    def next(self) -> None:
        done = self._begun
        self._begun += 1
        if done == 1:
            self._say(first_step_at=time.time(), first_step_cpu=_cpu_seconds())
        if done < self._task.warmup or (done - self._task.warmup) % self._task.turn:
            return
        if self._since is None:
            self._say(ready=True)
        self._end_turn()
        if done < self._task.steps:
            sys.stdin.readline()
            self._since = _cpu_seconds()

    def finish(self, loss: float) -> None:
        """loss: of the last step, in nats."""
        self._end_turn()
        self._say(loss=loss)
        self._say(peak_bytes=_peak_bytes())

    def _end_turn(self) -> None:
        if self._since is not None:
            self._say(turn_cpu=_cpu_seconds() - self._since)
            self._since = None

    def _say(self, **message: Any) -> None:
        print(json.dumps(message), file=self._channel, flush=True)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_bytes() -> int:
    """Of this process alone: ru_maxrss would begin with what its parent held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
