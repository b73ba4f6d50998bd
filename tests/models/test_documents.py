"""Attention inside documents: equal to a dense mask, and blind to other documents to the last bit."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import varlen

from titan_like.models import decoder, documents
from titan_like.models.decoder import Decoder, document_mask
from titan_like.models.documents import (
    Documents,
    attend_within_documents,
    dense_mask,
    document_bounds,
    document_lengths,
)
from titan_like.models.flavors import resolve
from titan_like.parallel.compile import compile_blocks
from titan_like.parallel.recompute import recompute_operations

LENGTHS = [[5, 1, 10], [16], [8, 8]]  # of the documents in three rows of 16


def starts_of(lengths: list[list[int]]) -> Tensor:
    return torch.tensor([[sum(row[:d]) for d, n in enumerate(row) for _ in range(n)] for row in lengths])


def packed(lengths: list[list[int]], more: int = 0) -> Documents:
    """With numbers that are too high by `more`."""
    return Documents(starts_of(lengths), sum(map(len, lengths)) + more, max(map(max, lengths)) + more)


def small_decoder(**more: int) -> Decoder:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 32,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 64,
        "max_seq_len": 64,
    }
    return Decoder(resolve("llama3", "debug", {**shape, **more}))


def test_bounds_and_the_mask_they_stand_for() -> None:
    bounds, longest = document_bounds(packed(LENGTHS))
    assert bounds.tolist() == [0, 5, 6, 16, 32, 40, 48] and bounds.dtype == torch.int32 and longest == 16
    index = torch.arange(16)
    assert torch.equal(dense_mask(bounds, 3, 16), document_mask(starts_of(LENGTHS), index, index))


def test_what_the_host_counts() -> None:
    assert document_lengths(starts_of(LENGTHS)) == tuple(map(tuple, LENGTHS))


def test_documents_that_are_not_there_are_empty_ones_at_the_end() -> None:
    bounds, longest = document_bounds(packed(LENGTHS, more=2))
    assert bounds.tolist() == [0, 5, 6, 16, 32, 40, 48, 48, 48] and longest == 18
    index = torch.arange(16)
    assert torch.equal(dense_mask(bounds, 3, 16), document_mask(starts_of(LENGTHS), index, index))


def test_bounds_need_no_value_of_the_device() -> None:
    starts, number, longest = packed(LENGTHS)
    starts = starts.to("meta")  # which has none: reading one is an error
    assert document_bounds(Documents(starts, number, longest))[0].shape == (7,)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("more", [0, 3])
def test_values_and_gradients_are_those_of_a_dense_mask(dtype: torch.dtype, tolerance: float, more: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(3, 16, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(4))
    bounds, longest = document_bounds(packed(LENGTHS, more))
    found = attend_within_documents(q, k, v, bounds, longest)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(bounds, 3, 16))
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=4 * tolerance, rtol=0)


@pytest.mark.parametrize("lengths", [[[130, 1, 129]], [[260], [128, 132]], [[384], [383, 1]], [[2049], [2048, 1]]])
def test_gradients_of_documents_that_are_cut_into_pieces(lengths: list[list[int]]) -> None:
    torch.manual_seed(0)
    rows, seq_len = len(lengths), sum(lengths[0])
    q, k, v, grad = (torch.randn(rows, seq_len, 2, 8).transpose(1, 2).requires_grad_() for _ in range(4))
    bounds, longest = document_bounds(packed(lengths))
    found = torch.autograd.grad(attend_within_documents(q, k, v, bounds, longest), (q, k, v), grad)
    q, k, v, grad = (x.detach().double().requires_grad_() for x in (q, k, v, grad))
    mask = dense_mask(bounds, rows, seq_len)
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (q, k, v), grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tokens", "calls"), [(128, 1), (129, 2), (512, 4), (2048, 16), (2049, 1)])
def test_which_documents_are_cut_into_pieces(tokens: int, calls: int) -> None:
    document = (slice(1), slice(None), slice(7, 7 + tokens))
    pieces = list(documents._pieces(document, torch.float32))
    assert len(pieces) == calls
    assert [i for _, (_, _, keys), _ in pieces for i in range(7 + tokens)[keys]] == list(range(7, 7 + tokens))
    assert len(list(documents._pieces(document, torch.bfloat16))) == 1


@pytest.mark.parametrize("seq_len", [16, 300])
def test_a_plain_row_is_one_document(seq_len: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, seq_len, 8).requires_grad_() for _ in range(4))
    found, wanted = documents.attend_causally(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_r008_a_document_never_sees_another() -> None:
    model, rows = small_decoder(), packed([[5, 1, 10]])
    tokens, positions = torch.randint(0, 32, (1, 16)), torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 32
    one, other = model(tokens, positions, rows), model(changed, positions, rows)
    assert torch.equal(one[0, 5:], other[0, 5:]) and torch.equal(one[0, :2], other[0, :2])
    assert (one[0, 2:5] != other[0, 2:5]).any(-1).all()  # the document itself does see it


def test_r009_a_packed_document_is_as_it_is_alone() -> None:
    model, rows = small_decoder(), packed([[5, 1, 10]])
    tokens, positions = torch.randint(0, 32, (1, 16)), torch.arange(16)[None]
    together = model(tokens, positions - rows.starts, rows)
    for begin, end in ((0, 5), (5, 6), (6, 16)):
        alone = model(tokens[:, begin:end], positions[:, : end - begin])
        torch.testing.assert_close(together[:, begin:end], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_compiled_blocks_take_any_number_of_documents() -> None:
    model, compiled = small_decoder(), small_decoder()
    compiled.load_state_dict(model.state_dict())
    compile_blocks(compiled)  # fullgraph: a graph break is an error
    tokens, positions = torch.randint(0, 32, (3, 16)), torch.arange(16).expand(3, 16)
    for lengths in (LENGTHS, [[16], [16], [16]], [[1] * 16, [16], [3, 13]]):
        losses = [m(tokens, positions, packed(lengths)).square().sum() for m in (model, compiled)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        gradients = [
            torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (model, compiled), strict=True)
        ]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def _weights(q: Tensor, k: Tensor, bounds: Tensor, longest: int) -> Tensor:  # (N, T, H) each -> (N, T, T)
    lengths = bounds.diff()
    assert lengths.min() >= 0 and lengths.max() <= longest and bounds[-1] == q.shape[1]
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    seen = (document[:, None] == document).tril()
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, *more: Any) -> Any:
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    out = (_weights(*heads[:2], bounds, longest) @ heads[2]).transpose(0, 1).contiguous()
    return out, out.new_zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, _: Any, longest: int,
    *more: Any,
) -> Any:  # fmt: skip
    grad, q, k, v = (x.transpose(0, 1) for x in (grad, q, k, v))
    weights, d_weights = _weights(q, k, bounds, longest), grad @ v.mT
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return tuple(x.transpose(0, 1).contiguous() for x in (d_scores @ k, d_scores.mT @ q, weights.mT @ grad))


@pytest.mark.parametrize("wrap", [recompute_operations, lambda model: None])
def test_a_gpu_gets_any_number_of_documents_without_compiling_again(wrap: Callable[[Decoder], None]) -> None:
    """The variable-length kernel written out, behind torch's operator, which has none for the CPU."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)
    model, compiled = small_decoder(), small_decoder()
    compiled.load_state_dict(model.state_dict())
    wrap(compiled)
    torch.compiler.reset()
    counters.clear()
    compile_fast = torch.compile
    with mock.patch("torch.compile", lambda function, **options: compile_fast(function, backend="aot_eager")):
        compile_blocks(compiled)
    tokens, positions, graphs = torch.randint(0, 32, (3, 16)), torch.arange(16).expand(3, 16), []
    one, more_of_them = [[16]] * 3, [[16], [8, 8], [16]]  # the number changes before the longest does
    for lengths, more in ((one, 0), (more_of_them, 0), ([[3, 13]] * 3, 0), ([[1] * 16] * 3, 1), (LENGTHS, 4)):
        loss = model(tokens, positions, packed(lengths)).square().sum()
        with mock.patch.object(decoder, "attend_within_documents", documents._variable_length):
            other = compiled(tokens, positions, packed(lengths, more)).square().sum()
            torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
            found = torch.autograd.grad(other, list(compiled.parameters()))
        torch.testing.assert_close(found, torch.autograd.grad(loss, list(model.parameters())), rtol=1e-4, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert graphs == [1, 2, 2, 2, 2]  # of sizes as they are, of any sizes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, 16, 2, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    starts, number, longest = packed(LENGTHS, more=2)
    starts = starts.cuda()
    torch.cuda.set_sync_debug_mode("error")  # of any wait for the device
    try:
        bounds, _ = document_bounds(Documents(starts, number, longest))
        found = attend_within_documents(q, k, v, bounds, longest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(bounds, 3, 16))
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0)
