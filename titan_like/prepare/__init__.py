"""From raw text to token shards."""

from collections.abc import Sequence
from pathlib import Path

from titan_like.prepare.config import PrepareConfig, load_prepare_config

DEFAULT_OUTPUT = Path("data/stdlib")

__all__ = ["PrepareConfig", "ensure_default", "load_prepare_config"]


def ensure_default(prefixes: Sequence[str]) -> None:
    """Prepare the default corpus if these are its prefixes, [...]/data/stdlib/{train,validation}, and it is missing."""
    folders = {Path(prefix).parent for prefix in prefixes}
    names = {Path(prefix).name for prefix in prefixes}
    if len(folders) != 1 or not names <= {"train", "validation"}:
        return
    folder = folders.pop()
    present = all(Path(f"{prefix}.idx").exists() for prefix in prefixes)
    if folder.absolute().parts[-2:] == DEFAULT_OUTPUT.parts and not present:
        from titan_like.prepare.pipeline import prepare  # datatrove: not on every start of a training

        prepare(default_config(str(folder)))


def default_config(folder: str) -> PrepareConfig:
    """The default corpus: the same settings as train_configs/data/stdlib.toml."""
    return load_prepare_config(["--output.folder", folder, "--input.bad_input", "skip"])
