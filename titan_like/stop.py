"""Stopping at the end of a step: on a signal, or when a time limit is reached. All ranks stop at the same step."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command goes on later
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # of schedulers, of Ctrl-C, of Slurm before its time limit
REPEAT_SECONDS = 2.0  # a launcher may pass on a signal that the scheduler has also sent: one request


class StopRequest:
    """While entered, a signal asks for a stop; a second one, later than REPEAT_SECONDS, ends this process at once.

    Ranks agree through an all-reduce of one number that runs beside the step: `vote` starts it before the step,
    `agreed` reads it after. A request is therefore met at the end of the step in which it comes, or of the next.

    Args:
        limit_seconds: age of this process at which it asks for a stop itself; 0: never.
    """

    def __init__(self, limit_seconds: int = 0) -> None:
        self.reason = ""
        self._limit = limit_seconds
        self._born = psutil.Process().create_time()
        self._asked_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not self._asked_at:
            self.reason, self._asked_at = name, now
            _say(f"{name}: stopping at the end of the step, with a checkpoint; once more ends at once\n")
        elif now - self._asked_at > REPEAT_SECONDS:
            _say(f"{name} again: ending at once\n")
            os._exit(128 + number)

    def vote(self) -> None:
        """Start to ask all ranks; collective."""
        if self._limit and not self.reason and time.time() - self._born >= self._limit:
            self.reason = f"checkpoint.stop_after_seconds ({self._limit})"
        self._votes = torch.tensor([bool(self.reason)], dtype=torch.int32)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        """Whether any rank had asked when it voted; the same everywhere."""
        self._work.wait()
        return bool(self._votes)


def ignore_signals() -> None:
    """For a rank that has saved and is leaving: torchrun ends the others as soon as the first has left."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str) -> None:
    """A signal handler may have interrupted the logging or print that it would use."""
    os.write(2, text.encode())
