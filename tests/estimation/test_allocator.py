"""The allocator's rules, each worked out by hand."""

import pytest

from estimation.allocator import CachingAllocator, OutOfMemory, replay

KIB, MIB = 1 << 10, 1 << 20


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((1, 512, 513)):
        allocator.allocate(key, size, 0)
    assert allocator.allocated == 512 + 512 + 1024
    assert allocator.reserved == 2 * MIB  # all three from one small segment


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, size, 0)
    assert allocator.reserved == segment


def test_large_blocks_are_split_only_where_more_than_one_mib_is_left() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 19 * MIB, 0)  # its own segment of 20 MiB; 1 MiB is left and stays in the block
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_freed_neighbours_join_and_serve_again() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 512 * KIB, 0)  # fills a small segment
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(4, MIB, 0)  # fits in the two only when they have joined
    assert allocator.reserved == 2 * MIB


def test_best_fit_takes_the_smallest_block_that_holds() -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((16 * MIB, 12 * MIB)):
        allocator.allocate(key, size, 0)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 12 * MIB, 0)  # from the segment of 12
    allocator.allocate(3, 16 * MIB, 0)  # so that of 16 is still there
    assert allocator.reserved == 28 * MIB


def test_a_stream_does_not_use_what_another_freed() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 12 * MIB, 0)
    allocator.free(0)
    allocator.allocate(1, 12 * MIB, 1)
    assert allocator.reserved == 24 * MIB


def test_expandable_segments_grow_where_separate_ones_leave_holes() -> None:
    """20, freed, then 30: two segments of 20 and 30 MiB, or one of 40 (pages of 20)."""
    events = [(1, 0, 20 * MIB, 0), (-1, 0, 20 * MIB, 0), (1, 1, 30 * MIB, 0)]
    assert replay(events, expandable=False).peak_reserved == 50 * MIB
    assert replay(events, expandable=True).peak_reserved == 40 * MIB


def test_expandable_segments_grow_after_a_used_end() -> None:
    events = [(1, 0, 20 * MIB, 0), (1, 1, 20 * MIB, 0), (-1, 0, 20 * MIB, 0), (1, 2, 25 * MIB, 0), (1, 3, 15 * MIB, 0)]
    # 20 + 20 are mapped; 25 do not fit into the hole of 20 and map 40 more; 15 fit best into the 15 that are left.
    assert replay(events, expandable=True).peak_reserved == 80 * MIB


def test_a_full_device_gives_cached_segments_back_first() -> None:
    events = [(1, 0, 20 * MIB, 0), (-1, 0, 20 * MIB, 0), (1, 1, 30 * MIB, 0)]
    result = replay(events, capacity=40 * MIB, expandable=False)
    assert (result.fits, result.retries, result.peak_reserved) == (True, 1, 30 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_does_not_fit_is_told(expandable: bool) -> None:
    result = replay([(1, 0, 20 * MIB, 0), (1, 1, 30 * MIB, 0)], capacity=40 * MIB, expandable=expandable)
    assert (result.fits, result.peak_reserved) == (False, 20 * MIB)
    allocator = CachingAllocator(capacity=MIB)
    with pytest.raises(OutOfMemory, match="2097152 more bytes"):
        allocator.allocate(0, 1, 0)


@pytest.mark.parametrize("expandable", [False, True])
def test_nothing_is_lost_over_many_allocations(expandable: bool) -> None:
    """Sizes and lifetimes of all kinds; in the end everything is free and joined, so the largest request fits again."""
    allocator = CachingAllocator(expandable=expandable)
    sizes = [(n * 7919) % (24 * MIB) + 1 for n in range(200)]
    live: list[int] = []
    for key, size in enumerate(sizes):
        allocator.allocate(key, size, key % 2)
        live.append(key)
        if key % 3:
            allocator.free(live.pop((key * 31) % len(live)))
    assert allocator.allocated >= sum(sizes[key] for key in live)
    for key in live:
        allocator.free(key)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    allocator.allocate(1000, 20 * MIB, 0)
    assert allocator.reserved == reserved
