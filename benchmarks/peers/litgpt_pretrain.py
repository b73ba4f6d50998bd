"""litgpt's pretraining (Lightning Fabric) of its own GPT, in the shape of Llama. It compiles the whole model, always;
a switch of torch's makes that do nothing where eager is asked for."""

from pathlib import Path
from typing import Any

import torch
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule

from benchmarks.peers.gate import Gate, NotRunnable, Task


class FusedAdamW(torch.optim.AdamW):
    """litgpt asks for the fused kernel on GPUs only."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def run(task: Task, gate: Gate, variant: str) -> None:
    if task.packed:
        raise NotRunnable("plain rows only")
    if task.processes > 1:
        raise NotRunnable("Lightning's FSDP strategy needs GPUs")
    torch._dynamo.config.disable = not task.compiled

    class Rows(DataModule):
        """The batches, each handed out when its step begins; one more for the sanity check."""

        def connect(self, *args: Any, **kwargs: Any) -> None:
            self.batches = [torch.from_numpy(batch) for batch in task.batches(0)]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.batches, batch_size=None, collate_fn=begin_step)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.batches[:1], batch_size=None)

    def begin_step(batch: Any) -> Any:
        gate.next()
        return batch

    losses: list[Any] = []
    compute_loss = pretrain.chunked_cross_entropy

    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        losses[:] = [loss.detach()]
        return loss

    pretrain.chunked_cross_entropy = recorded
    pretrain.save_checkpoint = lambda *_: None  # at the end, whatever is set
    shape = task.shape
    pretrain.setup(
        model_name="llama",
        model_config=Config(
            name="llama", block_size=task.seq_len, n_embd=shape["dim"], n_layer=shape["n_layers"],
            n_head=shape["n_heads"], intermediate_size=shape["ffn_dim"], vocab_size=shape["vocab_size"],
            padded_vocab_size=shape["vocab_size"], rotary_percentage=1.0, rope_base=500_000, parallel_residual=False,
            bias=False, norm_class_name="RMSNorm", norm_eps=1e-5, mlp_class_name="LLaMAMLP",
        ),
        out_dir=Path(task.folder), precision="32-true", data=Rows(), devices=1, logger_name="csv",
        train=TrainArgs(
            save_interval=None, log_interval=1, global_batch_size=task.batch, micro_batch_size=task.batch,
            max_tokens=task.steps * task.batch * task.seq_len, max_norm=1.0, min_lr=task.lr, lr_warmup_steps=0,
        ),
        eval=EvalArgs(interval=10**9, initial_validation=False, final_validation=False),
        optimizer={"class_path": f"{__name__}.FusedAdamW", "init_args": {"lr": task.lr}},
    )  # fmt: skip
    gate.finish(losses[0].item())
