"""A run that is small enough for a test: a corpus of random tokens and a model of 7,760 parameters, in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config import Config, load_config
from titan_like.data.indexed import IndexedWriter
from titan_like.parallel.distributed import close_process_group
from titan_like.trainer import Trainer

VOCAB, SEQ_LEN = 96, 16
SHAPE = {"vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32, "max_seq_len": 64}
DEFAULTS: dict[str, Any] = {
    **{f"model.overrides.{key}": value for key, value in SHAPE.items()},
    "training.steps": 6,
    "training.seq_len": SEQ_LEN,
    "training.local_batch_size": 2,
    "training.mixed_precision_param": "float32",
    "data.validation": "[]",
    "optimizer.lr": 0.01,
    "checkpoint.no-enable": None,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "comm.backend": "gloo",
    "comm.init_timeout_seconds": 60,
    "comm.train_timeout_seconds": 60,
}


def write_corpus(prefix: Path, documents: int = 40, seed: int = 0) -> Path:
    """Documents of 20 to 79 tokens with ids that follow each other, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document((rng.integers(VOCAB) + np.arange(rng.integers(20, 80))) % VOCAB)
    return prefix


def arguments(folder: Path, **settings: Any) -> list[str]:
    """The command line of a tiny run in `folder` on `folder`/../train; `a__b=value` stands for --a.b=value."""
    given = {"job.dump_folder": folder, "data.train": folder.parent / "train", **DEFAULTS}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    if given.pop("checkpoint.enable", False):
        del given["checkpoint.no-enable"]
    return [f"--{key}" if value is None else f"--{key}={value}" for key, value in given.items()]


def config(folder: Path, **settings: Any) -> Config:
    return load_config(arguments(folder, **settings))


def run(folder: Path, until: int | None = None, **settings: Any) -> Trainer:
    """Train to the end or up to the step `until`, in this process."""
    try:
        trainer = Trainer(config(folder, **settings))
        trainer.fit(until)
        trainer.close()
    finally:
        close_process_group()  # a run that fails would leave it to the next one
    return trainer


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The logged loss by step, at full precision; a step that was logged twice is an error."""
    lines = [line for line in logged(folder) if "loss" in line]
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found
