"""A loop written by hand with the known techniques: fused projections, rotary tables made once, torch's kernel for
causal attention, the loss in chunks (or not), fused AdamW, torch's clipping, FSDP2, garbage collection put off."""

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers.gate import Gate, NotRunnable, Task, rank

CHUNK = 1024  # tokens


def run(task: Task, gate: Gate, variant: str) -> None:
    if task.packed:
        raise NotRunnable("plain rows only")
    torch.manual_seed(0)
    model = Model(**task.shape, seq_len=task.seq_len, chunked=variant == "chunked")
    if task.compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    gc.disable()
    *_, last = losses(model, task, gate.next)
    gate.finish(average(last))


def losses(model: nn.Module, task: Task, begin_step: Callable[[], None] = lambda: None) -> Iterator[float]:
    """Train; this rank's loss of each step."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=(0.9, 0.95), fused=True)
    for rows in task.batches(rank()):
        begin_step()
        batch = torch.from_numpy(rows)
        mean = model(batch[:, :-1], batch[:, 1:])
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield mean.item()


def average(loss: float) -> float:
    if not dist.is_initialized():
        return loss
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Model(nn.Module):
    def __init__(
        self, dim: int, n_layers: int, n_heads: int, ffn_dim: int, vocab_size: int, seq_len: int, chunked: bool
    ) -> None:
        super().__init__()
        self.chunked = chunked
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, ffn_dim) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * n_layers) ** 0.5 if into_stream else 0.02)
        half = dim // n_heads // 2
        angles = torch.outer(torch.arange(seq_len).float(), 500_000.0 ** (-torch.arange(half) / half))
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]  # (S, 1, H / 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # (B, S) both -> ()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x, labels = self.norm(x).flatten(0, 1), labels.flatten()
        if self.chunked:
            mean: Tensor = ChunkedLoss.apply(x, self.head.weight, labels)
            return mean
        return F.cross_entropy(self.head(x), labels)


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.heads = n_heads
        self.norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, S, D)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of a linear head. Gradients are made in the forward, so that one chunk's logits live."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # (T, D), (V, D), (T,) -> ()
        assert not isinstance(weight, DTensor), "FSDP has gathered it"
        total, d_x, d_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for part, chunk, wanted in zip(d_x.split(CHUNK), x.split(CHUNK), labels.split(CHUNK), strict=True):
            log_probabilities = F.log_softmax(chunk @ weight.T, -1)
            total -= log_probabilities.gather(1, wanted[:, None]).sum()
            slope = log_probabilities.exp_()
            slope[torch.arange(len(wanted)), wanted] -= 1
            slope /= len(labels)
            torch.mm(slope, weight, out=part)
            d_weight.addmm_(slope.T, chunk)
        ctx.save_for_backward(d_x, d_weight)
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = ctx.saved_tensors
        return d_x * grad, d_weight * grad, None
