"""torchrun with a readable end: `python -m titan_like.torchrun ARGUMENTS OF titan_like.train`, on each node.

From the environment: NPROC, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT (see run_train.sh), and LOG_RANK, the local
ranks whose output is shown, such as 0 or 0,1. The others write to files, which are kept only if the run fails.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from titan_like.stop import EXIT_CODE, REPEAT_SECONDS, SIGNALS

TAIL_LINES = 30


def main(argv: Sequence[str], env: Mapping[str, str], module: str = "titan_like.train") -> int:
    """Run `module` in NPROC processes. Returns the exit code: that of the rank that failed first, or 128 + signal."""
    logs = Path(tempfile.mkdtemp(prefix="titan_like_logs_"))
    command = ["-m", module, *argv]
    # What it says of ranks that failed is said here, and of ranks that stopped when asked nothing is to be said.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    forwarding = Forwarding()
    try:
        run(parse_args([*rendezvous(env), *outputs(env), "--log-dir", str(logs), *command]))
    except ChildFailedError as error:
        if forwarding.ended_by or any(failure.exitcode == EXIT_CODE for failure in error.failures.values()):
            shutil.rmtree(logs, ignore_errors=True)
            return forwarding.ended_by or EXIT_CODE
        rank, failure = first_failure(error.failures, logs)
        print(report(rank, failure, logs), file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        print(f"Stopped by {signal.Signals(error.sigval).name}.", file=sys.stderr)
        shutil.rmtree(logs, ignore_errors=True)
        return 128 + error.sigval
    shutil.rmtree(logs, ignore_errors=True)
    return 0


class Forwarding:
    """Passes SIGNALS on to the ranks, which save and leave with EXIT_CODE; torchrun would kill them after 30 s.

    A second one, later than REPEAT_SECONDS, kills them: a rank that waits for another cannot look at its signals.

    Attributes:
        ended_by: 128 + the signal that did so, else 0.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self._first = 0.0
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now, ranks = time.monotonic(), psutil.Process().children()
        self._first = self._first or now
        if not ranks:  # they have not been started yet, or have all left
            raise SignalException("no rank to pass it on to", signal.Signals(number))
        if is_second := now - self._first > REPEAT_SECONDS:
            self.ended_by = 128 + number
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL if is_second else number)


def rendezvous(env: Mapping[str, str]) -> list[str]:
    """How the processes meet: on a free port if one node's user named none, so that jobs on one host never collide."""
    size = ["--nnodes", env.get("NNODES") or "1", "--nproc-per-node", env["NPROC"]]
    if size[1] == "1" and not env.get("MASTER_PORT"):
        return [*size, "--standalone"]
    host, port = env.get("MASTER_ADDR") or "127.0.0.1", env.get("MASTER_PORT") or "29500"
    return [*size, "--node-rank", env.get("NODE_RANK") or "0", "--master-addr", host, "--master-port", port]


def outputs(env: Mapping[str, str]) -> list[str]:
    """A shown rank keeps the terminal as standard output (for the progress bar); several are told apart by prefixes.

    Standard error of every rank also goes to a file, whose age tells afterwards which rank failed first.
    """
    shown = set((env.get("LOG_RANK") or "0").split(","))
    ranks = [str(rank) for rank in range(int(env["NPROC"]))]
    streams = "3" if len(shown) > 1 else "2"  # 1: standard output, 2: standard error, 3: both
    tee = ",".join(f"{rank}:{streams}" for rank in ranks if rank in shown)
    redirect = ",".join(f"{rank}:3" for rank in ranks if rank not in shown)
    # SIGNALS are left to Forwarding.
    return [
        "--role",
        "rank",
        "--signals-to-handle",
        "SIGHUP,SIGQUIT",
        *(["--tee", tee] if tee else []),
        *(["--redirects", redirect] if redirect else []),
    ]


def first_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> tuple[int, ProcessFailure]:
    """The failed rank whose standard error fell silent first: torchrun's own time stamps have whole seconds only. One
    that SIGTERM has killed was ended by torchrun, after another had failed."""

    def silent_since(rank: int) -> tuple[bool, float]:
        file = stderr_file(failures[rank], logs)
        return failures[rank].exitcode == -signal.SIGTERM, file.stat().st_mtime if file else float("inf")

    rank = min(failures, key=silent_since)
    return rank, failures[rank]


def stderr_file(failure: ProcessFailure, logs: Path) -> Path | None:
    return next(logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), None)


def report(rank: int, failure: ProcessFailure, logs: Path) -> str:
    """The end of the failed rank's standard error, and where the rest is."""
    file = stderr_file(failure, logs)
    tail = file.read_text(errors="replace").splitlines()[-TAIL_LINES:] if file else []
    end = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        end = f"killed by {failure.signal_name()}" + (", often for lack of memory" if failure.exitcode == -9 else "")
    head = f"\nRank {rank} failed first ({end}). All output of the ranks: {logs}\nThe last lines of its standard error:"
    return "\n".join([head, *(f"  {line}" for line in tail or ["(none)"])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
