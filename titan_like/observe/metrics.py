"""What a run says of itself: console lines, metrics.jsonl, TensorBoard, a progress bar.

Only one rank writes (see `MetricsWriter`), and what it writes are numbers of the whole run, never of one rank.
"""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_like.observe.appended import StepLog
from titan_like.observe.tensorboard import ScalarBoard


class MetricsWriter:
    """Appends one object per logged step to `<folder>/metrics.jsonl`, and the same to TensorBoard.

    Args:
        folder: the run folder.
        start_step: the last step that is already there; what an earlier run logged after it is dropped.
    Raises:
        OSError: the folder cannot be written; later failures are told, and end nothing.
    """

    def __init__(self, folder: Path, *, start_step: int, enable_tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = StepLog(folder / "metrics.jsonl", start_step)
        self._board = ScalarBoard(folder / "tensorboard", start_step=start_step) if enable_tensorboard else None

    def write(self, values: Mapping[str, Any]) -> None:
        """`values` holds "step" and numbers at full precision; JSON knows no NaN and no infinity: they become null."""
        self._log.write({k: value if value is None or math.isfinite(value) else None for k, value in values.items()})
        if self._board is not None:
            known = {key: value for key, value in values.items() if key != "step" and value is not None}
            self._board.write(values["step"], known)

    def close(self) -> None:
        self._log.close()
        if self._board is not None:
            self._board.close()


class ProgressBar:
    """A line that is redrawn in place on a terminal; nothing where standard output is not one."""

    def __init__(self, total_steps: int, enabled: bool) -> None:
        self._total, self._enabled = total_steps, enabled and sys.stdout.isatty()

    def draw(self, step: int, note: str) -> None:
        if self._enabled:
            filled = 30 * step // self._total
            print(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {step}/{self._total} {note}", end="", flush=True)

    def clear(self) -> None:
        if self._enabled:
            print("\r\x1b[K", end="", flush=True)


class Stopwatch:
    """Wall-clock seconds since the last reading, and the share of them spent waiting for data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0

    def add_wait(self, seconds: float) -> None:
        self._waited += seconds

    def leave_out(self, seconds: float) -> None:
        """Do not count so many seconds since the last reading: they were no part of the training steps."""
        self._start += seconds

    def read(self) -> tuple[float, float]:
        """(seconds, seconds waited) since the last reading; starts anew."""
        now = time.perf_counter()
        elapsed, waited = now - self._start, self._waited
        self._start, self._waited = now, 0.0
        return elapsed, waited


def console_line(values: Mapping[str, Any], total_steps: int, seconds_left: float) -> str:
    """One logged step for people."""
    mfu = "n/a" if values["mfu"] is None else f"{values['mfu']:.1%}"
    memory = {key.removeprefix("memory_gib/"): value for key, value in values.items() if "memory_gib/" in key}
    gib = " ".join(f"{kind} {value:.2f} GiB" for kind, value in memory.items())
    return (
        f"step {values['step']:>{len(str(total_steps))}}/{total_steps}  loss {values['loss']:.4f}  "
        f"grad norm {values['grad_norm']:.3f}  lr {values['lr']:.2e}  {values['tokens_per_s']:,.0f} tokens/s/device  "
        f"mfu {mfu}  {gib}  data wait {values['data_wait']:.1%}  left {duration(seconds_left)}"
    )


def duration(seconds: float) -> str:
    """ "1h 02m", "3m 20s" or "12s"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
