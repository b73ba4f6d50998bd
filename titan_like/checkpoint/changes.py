"""What a resumed run changes against the saved one: told, or refused until it is allowed.

Where and how fast a run computes may change freely: the mesh, recompute, compile, the micro-batch, logging, saving, the
number of steps. What decides the numbers that it computes is another run's if it changes.
"""

from typing import Any

import tomli

from titan_like.checkpoint.storage import Folder
from titan_like.config.errors import ConfigError

# Sections whose keys decide, but for those in FREE.
DECISIVE = ("data", "float8", "lr_schedule", "optimizer", "training")
FREE = {
    "data.num_workers",
    "data.on_exhausted",
    "data.train",  # by name; its contents are compared through the identity
    "data.validation",
    "optimizer.implementation",
    "training.deterministic",
    "training.global_batch_size",  # the data go on at the same sample; said by the trainer
    "training.local_batch_size",
    "training.skip_nonfinite",
    "training.steps",
}
Settings = dict[str, dict[str, Any]]


def changed_settings(saved: Settings, now: Settings, defaults: Settings) -> dict[str, tuple[Any, Any]]:
    """(old, new) by key. A key that the saved config does not know had its default."""
    changes = {}
    for section, values in now.items():
        for key, new in values.items():
            old = saved.get(section, {}).get(key, defaults[section][key])
            if _plain(old) != _plain(new) and (section, key) != ("checkpoint", "resume"):  # the request itself
                changes[f"{section}.{key}"] = (old, new)
    return changes


def saved_settings(path: Folder) -> Settings:
    """The config in a checkpoint folder."""
    return tomli.loads((path / "config.toml").read_text("utf-8"))


def is_decisive(key: str) -> bool:
    return key.split(".")[0] in DECISIVE and key not in FREE


def require_allowed(path: Folder, changes: dict[str, tuple[Any, Any]], allowed: bool) -> None:
    """
    Raises:
        ConfigError: a decisive setting changed and checkpoint.allow_changes is off.
    """
    decisive = [f"{key} was {old}, is {new}" for key, (old, new) in changes.items() if is_decisive(key)]
    if decisive and not allowed:
        raise ConfigError(
            f"{path} was trained with other settings ({'; '.join(decisive)}), so this would be another run; set them "
            "as they were, set checkpoint.allow_changes, or start anew in another job.dump_folder"
        )


def _plain(value: Any) -> Any:
    """Tuples as TOML gives them back."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
