"""Console output of a run with many processes: one rank speaks, the others only warn."""

import logging
import os
import sys
import warnings


def setup_logging(rank: int) -> None:
    """Messages of rank LOG_RANK (environment, default 0) go to standard output, warnings of all ranks too."""
    speaks = rank == int(os.environ.get("LOG_RANK", "0"))
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if speaks else f"[rank {rank}] %(message)s"))
    root = logging.getLogger("titan_like")
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.INFO if speaks else logging.WARNING)
    if not speaks:  # libraries' warnings are the same on every rank
        warnings.filterwarnings("ignore")
