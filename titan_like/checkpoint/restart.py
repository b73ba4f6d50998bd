"""After a crash the launcher starts the same command again, which goes on from what its earlier attempts have saved."""

import os
import socket

from titan_like.checkpoint.commit import CheckpointError, list_steps
from titan_like.checkpoint.manager import from_rank_0, read_record
from titan_like.checkpoint.storage import Folder


def launch_id() -> str:
    """Tells launches apart and is the same for all attempts of one; on rank 0. Set by run_train.sh, else the launcher's
    process: torchrun restarts its ranks without ending itself."""
    return os.environ.get("TITAN_LIKE_LAUNCH") or f"{socket.gethostname()}:{os.getppid()}"


def is_restart() -> bool:
    """Whether an earlier attempt of this launch has failed: counted by run_train.sh, or by torchrun --max-restarts."""
    return any(int(os.environ.get(name) or 0) for name in ("TITAN_LIKE_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def resume_of_attempt(folder: Folder, resume: str | int) -> str | int:
    """checkpoint.resume, but "auto" once this launch has saved a checkpoint in `folder`; collective."""
    return from_rank_0("auto" if is_restart() and _has_saved(folder) else resume)


def _has_saved(folder: Folder) -> bool:
    for step in reversed(list_steps(folder)):
        try:
            if read_record(folder, step).get("launch") == launch_id():
                return True
        except CheckpointError:
            continue  # damaged: choose_step says so
    return False
