"""Hugging Face's Trainer with a LlamaForCausalLM. Two processes ask for FSDP2 through its settings; accelerate 1.15
leaves the model whole on a CPU, which is then said instead of a number.
"""

import os
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.gate import Gate, NotRunnable, Task


def run(task: Task, gate: Gate, variant: str) -> None:
    if task.packed:
        raise NotRunnable("plain rows only")
    torch.manual_seed(0)
    shape = task.shape
    config = LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["dim"], intermediate_size=shape["ffn_dim"],
        num_hidden_layers=shape["n_layers"], num_attention_heads=shape["n_heads"], rope_theta=500_000.0,
        max_position_embeddings=task.seq_len, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    sharding = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "fsdp_version": 2}
    arguments = TrainingArguments(
        output_dir=task.folder, max_steps=task.steps, per_device_train_batch_size=task.local_batch, use_cpu=True,
        learning_rate=task.lr, lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta2=0.95,
        weight_decay=0.1, max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        torch_compile=task.compiled, dataloader_pin_memory=False, bf16=False,
        **({"fsdp": "full_shard auto_wrap", "fsdp_config": sharding} if "RANK" in os.environ else {}),
    )  # fmt: skip
    rows = np.load(task.rows)[:, :-1]
    dataset = [{"input_ids": row, "labels": row} for row in torch.from_numpy(rows)]  # the model shifts the labels
    trainer = InOrder(model=LlamaForCausalLM(config), args=arguments, train_dataset=dataset, callbacks=[Gated(gate)])
    trainer.train()
    gate.finish(next(line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line))


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Gated(TrainerCallback):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_step_begin(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        if "RANK" in os.environ and not isinstance(model, FSDPModule):
            raise NotRunnable("accelerate has not sharded it")
        self.gate.next()
