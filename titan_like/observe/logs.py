"""Console output of a run with many processes: one rank speaks, the others only warn."""

import logging
import os
import sys
import warnings


class Console(logging.StreamHandler):
    """Says once, on standard error, that its stream cannot be written, as when it is a file on a full disk."""

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            print(f"the console output could not be written: {error.strerror}; the run goes on", file=sys.stderr)


def setup_logging(rank: int) -> None:
    """Messages of rank LOG_RANK (environment, default 0) go to standard output, warnings of all ranks too."""
    speaks = rank == int(os.environ.get("LOG_RANK", "0"))
    handler = Console(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if speaks else f"[rank {rank}] %(message)s"))
    for package in ("titan_like", "estimation"):
        root = logging.getLogger(package)
        root.handlers, root.propagate = [handler], False
        root.setLevel(logging.INFO if speaks else logging.WARNING)
    if not speaks:  # libraries' warnings are the same on every rank
        warnings.filterwarnings("ignore")
