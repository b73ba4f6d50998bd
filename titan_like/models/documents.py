"""Causal attention, also inside the documents of packed rows, without computing what a mask would hide.

Documents are told by `bounds`, (number + 1,) int32: where each one begins in the B rows laid end to end, then B x S
(`cu_seqlens` in the words of the GPU kernels). A document never reaches over the end of its row. On the CPU each
document is one call of the flash kernel (in the backward some calls), and a plain row is one document; on GPUs all are
one call of the variable-length kernel.

Shapes and kernel launches hang on how many documents there are and how long the longest is. The host is told both with
the batch: to find them on the device would be to wait for it.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Documents(NamedTuple):
    """The documents of packed rows. The numbers may be too high, never too low."""

    starts: Tensor  # (B, S) int64: the index in the row of the first token of each token's document
    number: int  # of documents in all rows
    longest: int  # tokens of the longest document


Bounds = tuple[Tensor, int]  # bounds, (number + 1,) int32, and the tokens of the longest document
Place = tuple[slice, slice, slice]  # of a part of some rows in (B, N, S, ...) tensors

# In fp32 the CPU's kernel makes the gradients of a document of at most LONGEST tokens faster on few keys at a time: a
# causal mask spares it whole blocks only, of up to 256 x 512 scores. docs/experiments.md has the numbers.
KEYS, LONGEST = 128, 2048


def document_bounds(documents: Documents) -> Bounds:
    """Where documents begin. Those that `number` has too many are empty ones at the end."""
    starts = documents.starts
    begins = (starts == torch.arange(starts.shape[1], device=starts.device)).flatten()
    bounds = begins.nonzero_static(size=documents.number + 1, fill_value=begins.numel()).flatten()
    return bounds.int(), documents.longest


def document_lengths(starts: Tensor) -> tuple[tuple[int, ...], ...]:  # (B, S) int64, on the CPU
    """The tokens of each document of each row."""
    return tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in starts)


def attend_within_documents(
    q: Tensor,  # (B, N, S, H)
    k: Tensor,  # (B, N, S, H)
    v: Tensor,  # (B, N, S, H)
    bounds: Tensor,  # (number + 1,) int32
    longest: int,  # tokens of the longest document, or more
) -> Tensor:  # (B, N, S, H)
    """Block-diagonal causal attention. GPUs have kernels for 16-bit numbers only; others take a dense mask there."""
    if q.device.type == "cpu":
        return torch.ops.titan_like.document_attention(q, k, v, bounds)[0]
    if q.dtype in (torch.bfloat16, torch.float16):
        return _variable_length(q, k, v, bounds, longest)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(bounds, q.shape[0], q.shape[2]))


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, N, S, H) each
    """Causal attention where each row is one document."""
    if q.device.type == "cpu":
        return torch.ops.titan_like.document_attention(q, k, v, None)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dense_mask(bounds: Tensor, rows: int, seq_len: int) -> Tensor:  # (B, 1, S, S) bool
    """The mask that `bounds` stands for: True where a query (third dim) sees a key (last dim)."""
    index = torch.arange(rows * seq_len, device=bounds.device, dtype=bounds.dtype)
    document = torch.bucketize(index, bounds, right=True).view(rows, seq_len)
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]


def _variable_length(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, _, seq_len, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B x S, N, H)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
    return out.unflatten(0, (rows, seq_len)).transpose(1, 2)  # type: ignore[union-attr]


# Operators of their own, because their loops depend on the data: compiled blocks, recompute policies and fake tensors
# see one operation each.
@torch.library.custom_op("titan_like::document_attention", mutates_args=(), device_types="cpu")
def document_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, N, S, H) each -> output (B, N, S, H), logsumexp (B, N, S). No bounds: each row is one document."""
    out, lse = torch.empty_like(q), _empty_lse(q)
    for place in _places(bounds, q):
        out[place], lse[place] = _forward_kernel(q[place], k[place], v[place], 0.0, True)
    return out, lse


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _empty_lse(q)


@torch.library.custom_op("titan_like::document_attention_backward", mutates_args=(), device_types="cpu")
def document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of their shapes."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for document in _places(bounds, q):
        for seen_by, keys, mask in _pieces(document, q.dtype):
            # The kernel reads the logsumexp in the strides that its forward gives.
            lse_piece = lse[seen_by].transpose(1, 2).contiguous().transpose(1, 2)
            pieces = _backward_kernel(
                grad[seen_by], q[seen_by], k[keys], v[keys], out[seen_by], lse_piece, 0.0, mask is None, attn_mask=mask
            )
            for whole, piece in zip((dq[seen_by], dk[keys], dv[keys]), pieces, strict=True):
                whole += piece
            del pieces, piece  # before the next are made
    return dq, dk, dv


@document_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *torch.ops.titan_like.document_attention_backward(grad, *ctx.saved_tensors), None


document_attention.register_autograd(_backward, setup_context=_setup_context)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _places(bounds: Tensor | None, q: Tensor) -> Iterator[Place]:
    """Each document's place, but for the empty ones."""
    rows, _, seq_len, _ = q.shape
    for begin, end in pairwise(range(0, rows * seq_len + 1, seq_len) if bounds is None else bounds.tolist()):
        row, first = divmod(begin, seq_len)
        if begin < end:
            yield slice(row, row + 1), slice(None), slice(first, first + end - begin)


def _pieces(document: Place, dtype: torch.dtype) -> Iterator[tuple[Place, Place, Tensor | None]]:
    """The queries that see some keys, these keys, and what is added to their scores (queries, keys); None: causal."""
    row, heads, tokens = document
    first, end = tokens.start, tokens.stop
    if dtype != torch.float32 or not KEYS < end - first <= LONGEST:
        yield document, document, None
        return
    mask = torch.zeros(end - first, KEYS)
    mask[:KEYS] = torch.full((KEYS, KEYS), -math.inf).triu(1)
    for start in range(first, end, KEYS):
        stop = min(start + KEYS, end)
        keys, queries = slice(start, stop), slice(start, end)
        yield (row, heads, queries), (row, heads, keys), mask[: end - start, : stop - start]
