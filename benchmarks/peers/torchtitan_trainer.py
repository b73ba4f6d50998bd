"""torchtitan's Trainer with its Llama 3 debug model, which has the benchmark's shape.

It has no settings for a machine without a GPU. Given from outside, before it is imported: the device type; the few
functions of a device's module that torch.cpu lacks, which describe the device (a step calls one, for its report of
memory); and a stand-in for the kernels of its experts, which need Triton and which this model does without. Attention
is torch's causal kernel, since flex_attention has no backward on a CPU.
"""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.peers.gate import Gate, NotRunnable, Task, rank


def describe_cpu() -> SimpleNamespace:
    """A device's module for the CPU: torch.cpu, and what it lacks."""
    lacks: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        ),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**{**vars(torch.cpu), **lacks})


with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda name: describe_cpu()),
):
    import torchtitan.tools.utils  # noqa: F401
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 is written for a later torch
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Rows(BaseDataLoader):
    """The benchmark's rows, with the positions that torchtitan's own loaders give too."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        batches: list[np.ndarray]

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self.batches = config.batches

    def __iter__(self) -> Any:
        for batch in map(torch.from_numpy, self.batches):
            tokens = batch[:, :-1].contiguous()
            positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
            yield {"input": tokens, "positions": positions}, batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The rows are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def run(task: Task, gate: Gate, variant: str) -> None:
    if task.packed:
        raise NotRunnable("its attention for documents has no backward on a CPU")
    init_logger()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    losses: list[float] = []
    trainer = config(task, variant).build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):  # it adds gradients up in a way that gloo has not
            module.set_force_sum_reduction_for_comms(True)
    train_step, log = trainer.train_step, trainer.metrics_processor.log

    def gated(*args: Any) -> None:
        gate.next()
        train_step(*args)

    def recorded(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.train_step, trainer.metrics_processor.log = gated, recorded
    trainer.train()
    gate.finish(losses[-1])


def config(task: Task, variant: str) -> Any:
    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    found = {
        "dim": spec.model.dim, "n_layers": len(spec.model.layers), "vocab_size": spec.model.vocab_size,
        "n_heads": spec.model.layers[0].attention.n_heads, "ffn_dim": spec.model.layers[0].feed_forward.w1.out_features,
    }  # fmt: skip
    if found != task.shape:
        raise NotRunnable(f"its debug model has the shape {found}")
    return Trainer.Config(
        model_spec=spec,
        dump_folder=task.folder,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=task.shape["vocab_size"])),
        optimizer=default_adamw(lr=task.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=task.local_batch, seq_len=task.seq_len, steps=task.steps, max_norm=1.0,
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(batches=task.batches(rank())),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile=CompileConfig(enable=task.compiled),
        checkpoint=CheckpointManager.Config(enable=False),
        metrics=MetricsProcessor.Config(log_freq=1),
        **({"activation_checkpoint": None} if variant == "none" else {}),
    )  # fmt: skip
