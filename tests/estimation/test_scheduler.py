"""Orders of small programs, worked out by hand from inductor's rules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from estimation.inductor import Kernel, Size, fused, product
from estimation.scheduler import as_needed, scheduled

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


@pytest.mark.parametrize(("between", "is_one"), [(63, True), (64, False)])
def test_kernels_that_only_read_the_same_become_one_if_they_are_near(between: int, is_one: bool) -> None:
    """a is operation 1, p the last of those between, b the one after: 64 apart is near. A reader of a always is."""
    first, p = fused("a", A, "x", loops=FLAT), replace(product("p", "y", A), count=between)
    same, reader = fused("b", A, "x", loops=FLAT), fused("b", A, "a", loops=FLAT)
    assert order([first, p, same], {}, "a", "b", "p") == (["a", "b", "p"] if is_one else ["a", "p", "b"])
    assert order([first, p, reader], {}, "a", "b", "p") == ["a", "b", "p"]


@pytest.mark.parametrize(("before", "after", "partner"), [(1, 5, "a"), (5, 1, "c")])
def test_a_kernel_joins_of_two_the_one_that_is_nearer_in_operations(before: int, after: int, partner: str) -> None:
    """b reads what a and c read; they are kept apart by p."""
    a, b, c = (fused(name, A, *reads, loops=FLAT) for name, *reads in (("a", "x"), ("b", "x"), ("c", "x", "p")))
    q, r = (replace(product(name, "y", A), count=count) for name, count in (("q", before), ("r", after)))
    found = order([a, q, b, r, product("p", "a", A), c], {}, *"abcpqr")
    assert ("a" if found.index("b") < found.index("p") else "c") == partner
    assert abs(found.index("b") - found.index(partner)) == 1


def test_what_is_made_again_comes_before_the_first_that_needs_it() -> None:
    """In the order in which it was first made; what nobody needs is not made."""
    program = [
        product("a", "x", A), product("b", "a", A), product("c", "x", A), product("unread", "x", A),
        product("d", "y", A), product("e", "b", A), Kernel(("c", "a"), {"f": A}),
    ]  # fmt: skip
    found = as_needed(program, {"a", "b", "c", "unread"}, {})
    assert [name for kernel in found for name in kernel.makes] == ["d", "a", "b", "e", "c", "f"]


def test_what_is_computed_where_it_is_read_is_written_for_a_product() -> None:
    """The cast reads what the norm is made of; the norm is written before the other operand of the first product."""
    rows = ("rows", 4)
    program = [
        fused("n.rstd", SMALL, "x", loops=rows), fused("n", A, "x", "n.rstd", loops=rows),
        fused("cast", (4, 1), "n", loops=FLAT), product("d", "cast", A),
        fused("other", A, "d", loops=FLAT), Kernel(("other", "n"), {"gradient": A}), fused("late", A, "n", loops=FLAT),
    ]  # fmt: skip
    found = list(as_needed(program, {"n.rstd", "n", "cast"}, {"n": ("x", "n.rstd")}))
    names = [name for kernel in found for name in kernel.makes]
    assert names == ["n.rstd", "cast", "d", "n", "other", "gradient", "late"]
    assert (found[1].reads, found[1].loops) == (("x", "n.rstd"), rows) and found[-1].reads == ("n",)


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
