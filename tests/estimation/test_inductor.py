"""Buffers of small programs, worked out by hand from inductor's rules."""

from estimation.inductor import Kernel, collective, fused, product, steps

A, B, SMALL, LARGE = (4, 2), (8, 2), (1, 2), (100, 2)  # numbers of two bytes


def test_what_nobody_reads_any_more_goes_after_the_kernel_that_was_the_last_to_read_it() -> None:
    program = [product("a", "x", A), product("b", "a", B)]
    assert steps(program, {"x": A}, ["b"]) == [("a", 8), ("x", -8), ("b", 16), ("a", -8)]


def test_kernels_that_are_fused_make_all_their_results_before_anything_goes() -> None:
    program = [fused("a", A, "x"), fused("b", B, "a"), product("c", "b", LARGE)]
    made = [("a", 8), ("b", 16), ("x", -8), ("a", -8), ("c", 200), ("b", -16)]
    assert steps(program, {"x": A}, ["c"]) == made


def test_a_result_takes_the_place_of_what_the_kernel_before_was_the_last_to_read() -> None:
    """c lies where a was, d where b was; inputs, and numbers of another width, are no such places."""
    program = [product("a", "x", A), product("b", "a", B), product("c", "b", A), product("d", "c", B)]
    assert steps(program, {"x": A}, ["d"]) == [
        ("a", 8), ("x", -8), ("b", 16), ("a", -8), ("b", -16), ("d", 16),
    ]  # fmt: skip
    wide = [product("a", "x", A), product("b", "a", B), product("c", "b", (2, 4))]
    assert steps(wide, {"x": A}, ["c"]) == [("a", 8), ("x", -8), ("b", 16), ("a", -8), ("c", 8), ("b", -16)]


def test_an_older_place_is_held_only_if_the_most_that_is_needed_stays() -> None:
    """Until d is made, 8 bytes lie idle: beside c, whose 200 are the most, or before e, whose 200 are."""
    beside = [product("a", "x", A), product("b", "a", SMALL), product("c", "b", LARGE), product("d", "c", A)]
    assert steps(beside, {"x": A}, ["d"]) == [
        ("a", 8), ("x", -8), ("b", 2), ("a", -8), ("c", 200), ("b", -2), ("d", 8), ("c", -200),
    ]  # fmt: skip
    before = [*beside[:2], product("c", "b", (2, 2)), product("d", "c", A), product("e", "d", LARGE)]
    assert steps(before, {"x": A}, ["e"]) == [
        ("a", 8), ("x", -8), ("b", 2), ("c", 4), ("b", -2), ("c", -4), ("e", 200), ("a", -8),
    ]  # fmt: skip


def test_a_collective_has_memory_of_its_own_that_others_take_later() -> None:
    program = [product("a", "x", A), product("b", "a", B), collective("c", "b", A), product("d", "c", B)]
    found = steps(program, {"x": A}, ["d"])
    assert found[:5] == [("a", 8), ("x", -8), ("b", 16), ("a", -8), ("c", 8)]
    last = [collective("c", "x", A), product("d", "c", B), product("e", "d", A)]
    assert steps(last, {"x": A}, ["e"]) == [("c", 8), ("x", -8), ("d", 16), ("d", -16), ("c", -8), ("e", 8)]


def test_the_memory_of_an_operator_of_torch_is_not_taken_and_its_work_goes_with_it() -> None:
    program = [Kernel(("x",), {"a": A}, takes=False, gives=False, work=5), product("b", "a", B), product("c", "b", A)]
    assert steps(program, {"x": A}, ["c"]) == [
        ("attention at work", 5), ("a", 8), ("attention at work", -5), ("x", -8), ("b", 16), ("a", -8), ("c", 8),
        ("b", -16),
    ]  # fmt: skip


def test_a_result_may_be_written_over_what_is_read() -> None:
    program = [product("a", "x", A), fused("b", A, "a", over="a"), product("c", "b", B)]
    assert steps(program, {"x": A}, ["c"]) == [("a", 8), ("x", -8), ("c", 16), ("a", -8)]
