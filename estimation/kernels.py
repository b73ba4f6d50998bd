"""What kernels of the CPU and of NVIDIA GPUs keep in memory where fake tensors alone would not tell.

A trace runs on fake CPU tensors: fake GPU tensors abort in autograd on a build of torch without CUDA. For a GPU the
functions below stand in for what torch would choose there; see the table in docs/memory_trace.md.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Partial

from titan_like.models import decoder, documents
from titan_like.optim import clip
from titan_like.parallel import context


def composites() -> dict[Any, Callable[..., Any]]:
    """Operators of the trainer whose fake kernels hide what they allocate inside, and the functions that do not."""
    operators = torch.ops.titan_like
    return {
        operators.ring_attention.default: context.ring_attention._init_fn,
        operators.ring_attention_backward.default: context.ring_attention_backward._init_fn,
        # Each row one document asks for the largest temporaries.
        operators.document_attention.default: lambda q, k, v, bounds: documents.document_attention._init_fn(
            q, k, v, None
        ),
        operators.document_attention_backward.default: lambda grad, q, k, v, out, lse, bounds: (
            documents.document_attention_backward._init_fn(grad, q, k, v, out, lse, None)
        ),
    }


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Attention and norms as CUDA does them; on fake tensors only."""
    forward, backward, cuda = context._forward_op, context._backward_op, torch.device("cuda")
    with ExitStack() as stack:
        for owner, name, function in (
            (F, "scaled_dot_product_attention", gpu_attention),
            (F, "rms_norm", gpu_rms_norm),
            (F, "softmax", gpu_softmax),
            (context, "_forward_op", lambda device: forward(cuda)),
            (context, "_backward_op", lambda device: backward(cuda)),
            (decoder, "attend_causally", partial(gpu_attention, is_causal=True)),
            (decoder, "attend_within_documents", _gpu_documents),
            (clip, "_squares_by_rows", clip._squares),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Flash attention for 16-bit numbers without a mask, else the memory-efficient kernel; both keep q, k, v, the
    output and a log-sum-exp in fp32."""
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, 0.0, is_causal)[0]


def _gpu_documents(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    if q.dtype in (torch.bfloat16, torch.float16):
        return documents._variable_length(q, k, v, bounds, longest)
    return gpu_attention(q, k, v, documents.dense_mask(bounds, q.shape[0], q.shape[2]))


def gpu_softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """CUDA reads 16-bit numbers and writes fp32; a CPU makes a copy in fp32 first."""
    return torch.empty_like(x, dtype=dtype)


def gpu_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """The fused kernel of CUDA keeps its input, the weight and one fp32 number per row; that of the CPU is composed and
    keeps two copies of the input in fp32."""
    if not isinstance(x, DTensor):
        return _FusedNorm.apply(x, weight)
    assert isinstance(weight, DTensor)
    local = weight.to_local(grad_placements=[Partial() for _ in weight.placements])
    return DTensor.from_local(_FusedNorm.apply(x.to_local(), local), x.device_mesh, x.placements, run_check=False)


def fused_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """The operator behind it, which inductor takes apart."""
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def held_messages(*, until_wait: bool) -> Iterator[None]:
    """A fake world forgets a message at once. NCCL keeps the tensor until the wait (`until_wait`), gloo until the
    handle goes."""

    class Handle:
        def __init__(self, work: Any, tensors: list[Tensor]) -> None:
            self._work, self._tensors = work, tensors

        def wait(self, *arguments: Any) -> bool:
            if until_wait:
                self._tensors = []
            return self._work.wait(*arguments)

    def exchange(operations: list[Any], desc: str | None = None) -> list[Any]:
        works: list[Any] = original(operations, desc) if operations else []
        return [Handle(work, [operation.tensor for operation in operations]) for work in works]

    original = schedules._batch_p2p
    with patch.object(schedules, "_batch_p2p", exchange):
        yield
