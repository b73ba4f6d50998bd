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
KEEP = ("wk", "wo", "w3")


def block(
    recipe: str, names: frozenset[str] = ALL, *, tp: int = 1, number: int = 2, emulated: bool = False, rows: int = 1,
    keep: tuple[str, ...] = KEEP,
) -> Float8Block:  # fmt: skip
    casts = Float8(recipe, (names,), emulated=emulated)  # type: ignore[arg-type]
    shape = Shape(MODEL, rows=rows, seq_len=T // rows, tp=tp, number=number, compiled=True)
    return (SentBlock if tp > 1 and recipe == "tensorwise" else Float8Block)(shape, keep, casts, names)


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


def test_emulated_ranks_keep_16_bit_numbers_that_are_put_together_from_sequences() -> None:
    """Instead of bytes that lie the other way, of n1 and of n2. In fp32 the bytes are less."""
    for number, of_one, of_two in ((2, 1, 2), (4, 1, 1)):
        one, two = (block("rowwise", tp=2, number=number, emulated=True, rows=rows) for rows in (1, 2))
        assert kept(two) - kept(one) == 2 * T * 32 * (of_two - of_one)
    assert kept(block("rowwise", tp=2, rows=2)) == kept(block("rowwise", tp=2))


@pytest.mark.parametrize(("keep", "kept_too"), [("w1", 4 * T * 32), ("w3", 0)])
def test_what_an_emulated_product_is_made_of_is_kept_with_it_if_others_read_it(keep: str, kept_too: int) -> None:
    """w1 comes first: what it has read as fp32 is what w3 reads again. Else both are made again from n2."""
    alone = T * 48 * 2  # bf16; and of the rest nothing
    assert kept(block("rowwise", emulated=True, keep=(keep,)), "op") == alone + kept_too
    assert kept(block("rowwise", keep=(keep,)), "op") == alone


@pytest.mark.parametrize(
    ("recipe", "number", "emulated", "expected"),
    [
        ("tensorwise", 4, False, 50), ("tensorwise", 4, True, 42), ("rowwise", 2, False, 72), ("rowwise", 4, True, 64),
        ("rowwise_with_gw_hp", 2, False, 51), ("rowwise_with_gw_hp", 4, False, 49),
    ],
)  # fmt: skip
def test_kernels_are_as_far_apart_as_inductor_numbers_them(
    recipe: str, number: int, emulated: bool, expected: int
) -> None:
    """Operations from the gradient of n2 to that of n1, as torch 2.13 counts them. 64 are the limit for one kernel."""
    built, at, found = block(recipe, number=number, emulated=emulated), 0, dict[str, int]()
    for kernel in built.looped(built.backward("none")):
        at += kernel.count
        found |= dict.fromkeys(kernel.makes, at)
    assert abs(found["gradient of n1"] - found["gradient of n2"] - expected) <= 3


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
