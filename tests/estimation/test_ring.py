"""What ring attention holds, against the allocations of torch's own template on tensors without memory."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from estimation.kernels import composites, gpu_kernels
from estimation.ring import Ring
from estimation.trace import fake_world
from estimation.tracker import Tracker
from titan_like.parallel.context import ring

ROWS, SEQUENCE, HEAD = 2, 768, 64


def most(tracker: Tracker, start: int) -> int:
    now = highest = 0
    for sign, record in tracker.events[start:]:
        now += sign * record.size
        highest = max(highest, now)
    return highest


def held(heads: int, keys: int, cp: int, dtype: torch.dtype, gathers: bool, balanced: bool, gpu: bool):
    """(forward, backward): the most at any time on rank 0, without results."""
    tracker, fake = Tracker({}, composites()), FakeTensorMode(allow_non_fake_inputs=True)
    with (
        fake_world(cp, 0),
        gpu_kernels() if gpu else nullcontext(),
        pytest.MonkeyPatch.context() as patch,
        fake,
        tracker.watch(),
        tracker,
    ):
        patch.setattr(ring._cp_options, "enable_load_balance", balanced)
        methods = ring._RotateMethod
        patch.setattr(ring._cp_options, "rotate_method", methods.ALL_GATHER if gathers else methods.ALL_TO_ALL)
        group = dist.group.WORLD.group_name
        q, k, v = (torch.empty(ROWS, SEQUENCE // cp, n, HEAD, dtype=dtype).transpose(1, 2) for n in (heads, keys, keys))
        tracker.start_training()
        start = len(tracker.events)
        out, lse = torch.ops.titan_like.ring_attention(q, k, v, group)
        forward = most(tracker, start) - out.nbytes - lse.nbytes
        grad = torch.empty_like(q)
        start = len(tracker.events)
        torch.ops.titan_like.ring_attention_backward(grad, q, k, v, out, lse, group)
        return forward, most(tracker, start) - q.nbytes - k.nbytes - v.nbytes


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_the_ring_holds_what_torch_s_template_allocates(heads: int, keys: int, cp: int) -> None:
    """All that is counted but numbers of rows: they are below a tenth of the queries."""
    kinds = [(d, g, b) for d in (torch.bfloat16, torch.float32) for g in (True, False) for b in (True, False)]
    for number, (dtype, gathers, balanced) in enumerate(kinds):
        traced = held(heads, keys, cp, dtype, gathers, balanced, gpu=number % 3 == 0)
        size = ROWS * SEQUENCE // cp * HEAD * dtype.itemsize
        counted = Ring(
            heads * size, keys * size, dtype.itemsize, cp, gathers, balanced,
            repeats=keys < heads, copies=keys > 1, copies_queries=heads > 1,
        ).work  # fmt: skip
        assert counted == pytest.approx(traced, abs=0.1 * heads * size), (dtype, gathers, balanced)
