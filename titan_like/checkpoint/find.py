"""Which checkpoint a path means."""

from pathlib import Path

from titan_like.checkpoint.commit import list_steps
from titan_like.checkpoint.storage import Folder, locate
from titan_like.config.errors import ConfigError


def find_checkpoint(name: str | Path) -> tuple[Folder, int]:
    """(folder, step) of a step-N folder, or of the newest step inside a checkpoint folder; a path or a URL.

    Raises:
        ConfigError: there is none, or no driver for the URL.
        CheckpointError: the folder cannot be listed.
    """
    path = locate(name)
    if path.name.startswith("step-"):
        named = [step for step in list_steps(path.parent) if path.name == f"step-{step}"]
        if named:
            return path.parent, named[0]
    steps = list_steps(path)
    if not steps:
        raise ConfigError(f"{path} holds no complete checkpoint; name a checkpoint folder or one of its step-N folders")
    return path, steps[-1]
