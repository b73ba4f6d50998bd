"""Context parallelism: each rank of `cp` holds a part of every sequence.

Two ways, both exact. Ring attention (arXiv:2310.01889) moves keys and values around and skips what the causal mask
hides; it knows of no documents. With document masks keys and values are gathered whole instead, before the repetition
of heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor.experimental._context_parallel._attention as ring  # private; checked on torch 2.13
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_like.models.decoder import Attention, Decoder, document_mask, repeat_heads
from titan_like.models.documents import Documents

# Renamed in torch 2.13; 2.11 has the second name only.
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd


def local_index(seq_len: int, degree: int, rank: int, *, load_balance: bool) -> Tensor:
    """Which indices of a row the rank holds, (seq_len / degree,) int64, on the CPU.

    Load balancing gives rank r the chunks r and 2 x degree - 1 - r of 2 x degree: an early and a late one.
    """
    if not load_balance:
        return torch.arange(seq_len).chunk(degree)[rank]
    chunks = torch.arange(seq_len).chunk(2 * degree)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]])


def apply_context_parallel(
    model: Decoder, mesh: DeviceMesh, seq_len: int, *, documents: bool, load_balance: bool, rotate_method: str
) -> None:
    """Replace the attention of every block, and the mask that goes with it."""
    degree, rank = mesh.size(), mesh.get_local_rank()
    kind = GatheredAttention if documents else RingAttention
    for block in model.layers.values():
        cast(Attention, block.attention).inner = kind(mesh.get_group())
    index_of = partial(local_index, seq_len, degree, load_balance=load_balance)
    query_index = index_of(rank).to(mesh.device_type)  # once: a copy to the device in a step would wait for it
    # The order in which keys are gathered.
    key_index = torch.cat([index_of(other) for other in range(degree)]).to(mesh.device_type)

    def attention_mask(documents: Documents) -> Tensor:  # of rows of (B, S / cp) -> (B, 1, S / cp, S)
        return document_mask(documents.starts, query_index, key_index)

    model.attention_mask = attention_mask  # type: ignore[method-assign]
    # Globals of torch: all models of a process share them.
    ring._cp_options.enable_load_balance = load_balance
    ring.set_rotate_method(rotate_method)


class GatheredAttention(nn.Module):
    """Attention of the local queries over the keys and values of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:  # as CausalAttention; S local
        k, v = (_all_gather(x.contiguous(), 2, self.group) for x in (k, v))
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class RingAttention(nn.Module):
    """Causal ring attention over torch's template. Keys and values travel with their own number of heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group_name = group.group_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:  # as CausalAttention; S local
        return torch.ops.titan_like.ring_attention(q, k, v, self.group_name)[0]


# The ring is a custom operator, so that a compiled block holds it as one node and a recompute policy can name it.
@torch.library.custom_op("titan_like::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """(B, N, S, H), (B, K, S, H), (B, K, S, H) local -> output (B, N, S, H), logsumexp (B, N, S) fp32."""
    out, lse, *_ = ring._templated_ring_attention(
        _group(group_name), 2, _grouped(_forward_op(q.device)), q, k, v, is_causal=True
    )
    return out.to(q.dtype).contiguous(), lse.contiguous()


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("titan_like::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of their shapes."""
    gradients = ring._templated_ring_attention_backward(
        _group(group_name), 2, _grouped_backward(_backward_op(q.device)), grad_out=grad.contiguous(),
        grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True,
    )  # fmt: skip
    dq, dk, dv = (g.clone(memory_format=torch.contiguous_format) for g in gradients[:3])  # dk, dv share one buffer
    return dq, dk, dv


@ring_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, out, lse = ctx.saved_tensors
    return *torch.ops.titan_like.ring_attention_backward(grad, q, k, v, out, lse, ctx.group_name), None


ring_attention.register_autograd(_backward, setup_context=_setup_context)


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _grouped(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Repeat key/value heads only where a kernel runs on them, not where they travel."""

    def run(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return op(q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), is_causal)

    return run


def _grouped_backward(op: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        heads = key.shape[1]
        k, v = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        dq, dk, dv = op(grad_out, query, k, v, out, logsumexp, is_causal)
        return dq, *(g.unflatten(1, (heads, -1)).sum(2) for g in (dk, dv))

    return run


def _forward_op(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, is_causal) -> (output, logsumexp): the flash kernel of the device."""
    if device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return lambda q, k, v, is_causal: kernel(q, k, v, 0.0, is_causal)
    return lambda q, k, v, is_causal: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _backward_op(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if device.type == "cpu":
        return _cpu_backward

    def run(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The random state belongs to dropout, which there is none of; dense rows have no cumulative lengths.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state[:0]
        )

    return run


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel reads it in the strides that its forward gives
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal)
