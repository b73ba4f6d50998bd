"""Orders of small programs, worked out by hand from inductor's rules."""

from collections.abc import Mapping, Sequence

from estimation.inductor import Kernel, Size, fused, product
from estimation.scheduler import scheduled

A, SMALL, LARGE = (4, 2), (1, 2), (100, 2)  # numbers of two bytes
FLAT = ("flat", 4)


def order(program: Sequence[Kernel], inputs: Mapping[str, Size], *stays: str) -> list[str]:
    return [name for kernel in scheduled(program, inputs, stays) for name in kernel.makes]


def test_kernels_that_run_over_the_same_and_share_become_one_where_nothing_is_between() -> None:
    """b joins a, before p; c has to wait for p; d has other loops, and e shares nothing."""
    first, p = fused("a", A, "x", loops=FLAT), product("p", "a", A)
    b, c = fused("b", A, "x", loops=FLAT), fused("c", A, "a", "p", loops=FLAT)
    d, e = fused("d", A, "x", loops=("columns", 4)), fused("e", A, "y", loops=FLAT)
    stays = ("a", "b", "c", "d", "e", "p")
    assert order([first, p, b, c], {}, *stays[:3], "p") == ["a", "b", "p", "c"]
    assert order([first, p, d], {}, "a", "d", "p") == ["a", "p", "d"]
    assert order([first, p, e], {}, "a", "e", "p") == ["a", "p", "e"]


def test_a_total_joins_what_makes_its_numbers_and_who_reads_it_comes_after() -> None:
    """The cast reads a and its largest number: it cannot be one with them, or a would not have to be written."""
    program = [
        fused("a", A, "x", loops=FLAT), product("p", "x", A), fused("max", (1, 4), "a", loops=FLAT, total=True),
        fused("cast", (4, 1), "a", "max", loops=FLAT),
    ]  # fmt: skip
    assert order(program, {}, "cast", "p") == ["a", "max", "p", "cast"]


def test_what_is_read_in_its_own_kernel_alone_stays_in_registers() -> None:
    program = [fused("a", (4, 4), "x", loops=FLAT), fused("b", A, "a", loops=FLAT)]
    first, second = scheduled(program, {}, ["b"])
    assert (first.makes, first.unseen) == ({}, 16)
    assert (second.makes, second.reads) == ({"b": A}, ())


def test_a_result_is_written_over_what_its_kernel_alone_still_reads() -> None:
    """Not over x, which is not freed; not over what another reads, or of another width."""
    first, flat = product("a", "x", A), FLAT
    assert [kernel.over for kernel in scheduled([first, fused("b", A, "a", loops=flat)], {}, ["b"])] == ["", "a"]
    read_twice = [first, fused("b", A, "a", loops=flat), fused("c", A, "a", loops=flat)]
    assert [kernel.over for kernel in scheduled(read_twice, {}, ["b", "c"])] == ["", "", ""]
    assert scheduled([first, fused("b", (4, 4), "a", loops=flat)], {}, ["b"])[1].over == ""
    assert scheduled([fused("b", A, "x", loops=flat)], {}, ["b"])[0].over == ""


def test_what_frees_most_runs_first_where_that_needs_least() -> None:
    """As written both large results are there at once."""
    program = [
        product("large", "x", LARGE), product("other", "x", LARGE),
        product("small", "large", SMALL), product("least", "other", SMALL),
    ]  # fmt: skip
    assert order(program, {}, "small", "least") == ["large", "small", "other", "least"]


def test_an_order_that_is_no_better_than_the_one_as_written_is_not_taken() -> None:
    """All results stay: each order needs as much."""
    program = [product("large", "x", LARGE), product("small", "y", SMALL), product("a", "small", A)]
    assert order(program, {}, "large", "small", "a") == ["large", "small", "a"]
