"""titan_like: its Trainer as `titan-train` runs it, on the corpus itself."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from benchmarks.peers.gate import Gate, Task
from titan_like.config import load_config
from titan_like.models import decoder
from titan_like.models.documents import dense_mask
from titan_like.trainer import Trainer


def run(task: Task, gate: Gate, variant: str) -> None:
    if variant == "dense":
        attend_through_dense_mask()
    recompute = ["--activation_checkpoint.mode=selective"] if variant == "recompute" else []
    trainer = Trainer(load_config([*arguments(task), *recompute]))
    next_step = trainer.data.batches.next_step

    def gated() -> list[Any]:
        gate.next()
        return next_step()

    trainer.data.batches.next_step = gated  # type: ignore[method-assign]
    trainer.fit()
    lines = (Path(task.folder) / "metrics.jsonl").read_text().splitlines()
    gate.finish(json.loads(lines[-1])["loss"])
    trainer.close()


def arguments(task: Task) -> list[str]:
    shape = {**task.shape, "n_kv_heads": task.shape["n_heads"], "max_seq_len": task.seq_len, "init_std": 0.02}
    settings: dict[str, Any] = {
        **{f"model.overrides.{key}": value for key, value in shape.items()},
        "job.dump_folder": task.folder,
        "data.train": task.corpus,
        "data.validation": "[]",
        "data.reset_attention_mask": str(task.packed).lower(),
        "training.steps": task.steps,
        "training.seq_len": task.seq_len,
        "training.local_batch_size": task.local_batch,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": task.lr,
        "lr_schedule.decay_steps": 0,
        "compile.enable": str(task.compiled).lower(),
        "checkpoint.enable": "false",
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "comm.backend": "gloo",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def attend_through_dense_mask() -> None:
    """What packed documents cost with the kernel for any mask: one mask per batch, shared by all layers."""
    mask = lru_cache(maxsize=1)(dense_mask)

    def attend(q: Any, k: Any, v: Any, bounds: Any, longest: int) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(bounds, q.shape[0], q.shape[2]))

    decoder.attend_within_documents = attend
