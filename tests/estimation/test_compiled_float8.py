"""Compiled blocks in float8, counted by hand; the trace confirms them (test_formula_random.py)."""

from collections import Counter

import pytest

from estimation.compiled_block import compiled_backward, compiled_forward
from estimation.compiled_float8 import Float8Block, SentBlock
from estimation.float8 import Float8
from estimation.program import Shape
from estimation.tape import Mode
from titan_like.models.flavors import ModelConfig

# D 32, 4 heads of 8, 2 key heads, F 48; T 128 tokens in bf16.
MODEL = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_seq_len=128)
T, ALL = 128, frozenset({"wq", "wk", "wv", "wo", "w1", "w2", "w3"})
HIDDEN = T * 32 * 2
WEIGHTS = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
# wo; q, k and v of four heads; w1, w3; attention with a log-sum-exp; 1 / rms of two norms. No n1, n2 and gate.
KEPT = T * (32 + 3 * 32 + 2 * 48 + 32) * 2 + T * 4 * 4 + 2 * T * 4


def block(
    recipe: str, names: frozenset[str] = ALL, *, tp: int = 1, number: int = 2, emulated: bool = False
) -> Float8Block:
    casts = Float8(recipe, (names,), emulated=emulated)  # type: ignore[arg-type]
    shape = Shape(MODEL, rows=1, seq_len=T, tp=tp, number=number, compiled=True)
    return (SentBlock if tp > 1 and recipe == "tensorwise" else Float8Block)(shape, ("wk", "wo", "w3"), casts, names)


def kept(built: Float8Block, mode: Mode = "none") -> int:
    return sum(event.size for event in compiled_forward(built, mode)) - HIDDEN // built.shape.tp


def test_what_is_only_cast_is_not_kept() -> None:
    assert kept(block("tensorwise")) == kept(block("rowwise")) == KEPT
    assert kept(block("rowwise_with_gw_hp")) == KEPT + T * (32 + 32 + 48) * 2
    assert kept(block("tensorwise", ALL - {"wk"})) == KEPT + T * 32 * 2  # wk reads n1
    assert kept(block("tensorwise", ALL - {"w2"})) == KEPT + T * 48 * 2  # w2 the gate
    assert kept(block("tensorwise"), "full") == 0


def test_results_scaled_by_rows_are_kept_in_16_bits() -> None:
    """In fp32: w1, w3 and wo; what attention reads has four bytes a number."""
    built = block("rowwise", number=4)
    sixteen, whole = T * (2 * 48 + 32) * 2, T * (3 * 32 + 32) * 4
    of_both = T * 4 * 4 + 2 * T * 4 + T * 32 * 4 * 2  # log-sum-exp, 1 / rms; x is freed and the result made: equal
    assert sum(event.size for event in compiled_forward(built, "none")) == sixteen + whole + of_both - T * 32 * 4


def test_tensor_parallel_ranks_keep_operands_as_they_were_cast() -> None:
    """A byte a number of the weights, and of what is gathered; tensorwise of what wo and w2 read too."""
    whole = T * (3 * 16 + 2 * 24 + 16) * 2 + T * 2 * 4 + T * 4 + HIDDEN // 2  # as above, half of it; wo is scattered
    weights = WEIGHTS // 2
    assert kept(block("rowwise", tp=2)) == whole + weights + 2 * T * 32
    assert kept(block("tensorwise", tp=2)) == whole + weights + 2 * T * 32 + T * (16 + 24)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("mode", ["none", "op", "full"])
@pytest.mark.parametrize("names", [ALL, ALL - {"wk"}, ALL - {"w2"}, frozenset({"w1", "wo"})])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_backward_frees_what_a_forward_has_left_and_nothing_twice(
    recipe: str, emulated: bool, mode: Mode, names: frozenset[str], tp: int
) -> None:
    if tp > 1 and mode == "op":
        pytest.skip("refused by the trainer")
    built = block(recipe, names, tp=tp, emulated=emulated)
    there = Counter[tuple[str, int]]({("x", 0): HIDDEN // tp, ("dx", 1): HIDDEN // tp})
    for event in compiled_forward(built, mode):
        there[event.name, event.offset] += event.size
        assert there[event.name, event.offset] >= 0, event
    there["dx", 1] = HIDDEN // tp
    for event in compiled_backward(built, mode, "reduce-scatter"):
        there[event.name, event.offset] += event.size
        assert there[event.name, event.offset] >= 0, event
    norms = 2 * 32 * 2
    left = {name: size for (name, offset), size in there.items() if size and not name.startswith("gradient of ")}
    assert (
        sum(size for (name, _), size in there.items() if name.startswith("gradient of ")) == WEIGHTS * 2 // tp + norms
    )
    assert set(left) == {"x", "dx"}, left  # its result, and the gradient of its input
