"""Attention inside documents: equal to a dense mask, and blind to other documents to the last bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_like.models.decoder import Decoder, document_mask
from titan_like.models.documents import attend_within_documents, dense_mask, document_bounds
from titan_like.models.flavors import resolve
from titan_like.parallel.compile import compile_blocks

LENGTHS = [[5, 1, 10], [16], [8, 8]]  # of the documents in three rows of 16


def starts_of(lengths: list[list[int]]) -> Tensor:
    return torch.tensor([[sum(row[:d]) for d, n in enumerate(row) for _ in range(n)] for row in lengths])


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
    bounds = document_bounds(starts_of(LENGTHS))
    assert bounds.tolist() == [0, 5, 6, 16, 32, 40, 48] and bounds.dtype == torch.int32
    index = torch.arange(16)
    assert torch.equal(dense_mask(bounds, 3, 16), document_mask(starts_of(LENGTHS), index, index))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 0.03)]
)
def test_values_and_gradients_are_those_of_a_dense_mask(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(3, 16, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(4))
    bounds = document_bounds(starts_of(LENGTHS))
    found = attend_within_documents(q, k, v, bounds)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(bounds, 3, 16))
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=4 * tolerance, rtol=0)


def test_r008_a_document_never_sees_another() -> None:
    model, starts = small_decoder(), starts_of([[5, 1, 10]])
    tokens, positions = torch.randint(0, 32, (1, 16)), torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 32
    one, other = model(tokens, positions, starts), model(changed, positions, starts)
    assert torch.equal(one[0, 5:], other[0, 5:]) and torch.equal(one[0, :2], other[0, :2])
    assert (one[0, 2:5] != other[0, 2:5]).any(-1).all()  # the document itself does see it


def test_r009_a_packed_document_is_as_it_is_alone() -> None:
    model, starts = small_decoder(), starts_of([[5, 1, 10]])
    tokens, positions = torch.randint(0, 32, (1, 16)), torch.arange(16)[None]
    packed = model(tokens, positions - starts, starts)
    for begin, end in ((0, 5), (5, 6), (6, 16)):
        alone = model(tokens[:, begin:end], positions[:, : end - begin])
        torch.testing.assert_close(packed[:, begin:end], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_compiled_blocks_take_any_number_of_documents() -> None:
    model, compiled = small_decoder(), small_decoder()
    compiled.load_state_dict(model.state_dict())
    compile_blocks(compiled)  # fullgraph: a graph break is an error
    tokens, positions = torch.randint(0, 32, (3, 16)), torch.arange(16).expand(3, 16)
    for lengths in (LENGTHS, [[16], [16], [16]], [[1] * 16, [16], [3, 13]]):
        starts = starts_of(lengths)
        losses = [m(tokens, positions, starts).square().sum() for m in (model, compiled)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        gradients = [
            torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (model, compiled), strict=True)
        ]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, 16, 2, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    bounds = document_bounds(starts_of(LENGTHS).cuda())
    found = attend_within_documents(q, k, v, bounds)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(bounds, 3, 16))
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0)
