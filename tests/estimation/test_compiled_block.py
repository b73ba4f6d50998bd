"""The programs of compiled blocks, counted by hand; the trace confirms them (test_formula_random.py, test_trace.py)."""

from collections import Counter

import pytest

from estimation.compiled_block import CompiledBlock, compiled_backward, compiled_forward
from estimation.program import Shape
from estimation.tape import Mode
from titan_like.models.flavors import ModelConfig

# D 32, 4 heads of 8, 2 key heads, F 48; T 128 tokens in bf16.
MODEL = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_seq_len=128)
T, KEEP = 128, ("wk", "attention", "wo", "w3")
KEPT = {
    # n1, wo, n2; q, k and v of four heads; w1, w3, gate; attention with a log-sum-exp; 1 / rms of two norms.
    "none": T * (3 * 32 + 3 * 32 + 3 * 48 + 32) * 2 + T * 4 * 4 + 2 * T * 4,
    "op": T * (16 + 32 + 32 + 48) * 2 + T * 4 * 4,
    "full": 0,
}
LESS = {("wk", "wo", "w3"): KEPT["op"] - T * 32 * 2 - T * 4 * 4, (): 0}  # attention is made again, or all is
WEIGHTS = (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) * 2


@pytest.mark.parametrize(
    ("mode", "keep", "expected"),
    [*((mode, KEEP, size) for mode, size in KEPT.items()), *(("op", keep, size) for keep, size in LESS.items())],
)
def test_what_a_forward_leaves_a_backward_takes(mode: Mode, keep: tuple[str, ...], expected: int) -> None:
    shape = Shape(MODEL, rows=1, seq_len=T, compiled=True)
    forward = compiled_forward(CompiledBlock(shape, keep), mode)
    hidden = T * 32 * 2
    assert sum(event.size for event in forward) == expected + hidden  # and its result
    backward = compiled_backward(CompiledBlock(shape, keep), mode, "reduce-scatter")
    left = Counter[tuple[str, int]]()
    for event in backward:
        left[event.name, event.offset] += event.size
    assert sum(left.values()) == WEIGHTS - expected - hidden  # of x, the gradient of which takes the place of another
    assert left["x", 0] == -hidden and left["dx", 0] == hidden and left["dx", 1] == -hidden


def test_recompute_of_a_whole_block_makes_all_of_its_forward_twice() -> None:
    """From outside of what is compiled: both times everything is there until the block has run."""
    shape = Shape(MODEL, rows=1, seq_len=T, compiled=True)
    block = CompiledBlock(shape, KEEP)
    made = [event.size for event in compiled_forward(block, "none")]
    assert [event.size for event in compiled_forward(block, "full")][: len(made)] == made
    assert [event.size for event in compiled_backward(block, "full", "gradients")][: len(made)] == made


@pytest.mark.parametrize("mode", ["none", "op"])
def test_a_gpu_reads_a_document_mask_that_is_written_out_for_every_head(mode: Mode) -> None:
    """Both ways: from the one that is kept, or, if it is made again, at once. In fp32: (128, 128), for 4 heads."""
    one, heads = T * T * 4, 4 * T * T * 4
    shape = Shape(MODEL, rows=1, seq_len=T, number=4, documents=True, compiled=True)
    block = CompiledBlock(shape, KEEP)
    forward = compiled_forward(block, mode)
    assert [event.size for event in forward if event.size >= one] == ([heads] if mode == "op" else [one, heads])
    assert (("mask", one) in {(event.name, event.size) for event in forward}) == (mode == "none")
    backward = compiled_backward(block, mode, "gradients")
    large = [event.size for event in backward if abs(event.size) >= one]
    assert large == ([heads, -heads] if mode == "op" else [heads, -one, -heads])


def test_no_tensor_is_freed_before_it_is_made() -> None:
    shape = Shape(MODEL, rows=2, seq_len=T // 2, tp=2, compiled=True)
    there: Counter[str] = Counter()
    for event in compiled_forward(CompiledBlock(shape), "none"):
        there[event.name + "out" * event.offset] += event.size
        assert min(there.values()) >= 0, event
