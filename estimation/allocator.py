"""A model of torch's CUDA caching allocator: from a sequence of allocations to the bytes it takes from the device.

Rules of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512 B. Requests up to 1 MiB are cut from segments of
2 MiB; those below 10 MiB from segments of 20 MiB; larger ones get a segment of their own, rounded up to 2 MiB. A freed
block joins its free neighbours and serves only its own stream and size class again, best fit first. A segment goes back
to the device only when the device is full. With expandable segments each stream and size class has one range of
addresses that grows at its end by pages of 2 MiB (small) or 20 MiB (large).

Not modelled: max_split_size, garbage collection, graph pools, and memory held by events of other streams.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512  # bytes
SMALL, LARGE = MIB, 10 * MIB  # the largest small request; the smallest request with a segment of its own
SMALL_PAGE, LARGE_PAGE, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; neighbours in the same segment are linked."""

    segment: int
    address: int  # in the segment
    size: int
    pool: "Pool"
    is_free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(eq=False)
class Pool:
    """Free blocks of one stream and size class, by (size, segment, address)."""

    is_small: bool
    free: list[tuple[int, int, int, Block]] = field(default_factory=list)
    last: Block | None = None  # the end of the range of an expandable segment

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.segment, block.address))]

    def take(self, size: int) -> Block | None:
        """The smallest free block of `size` bytes or more."""
        index = bisect_left(self.free, (size, -1, -1))
        return self.free.pop(index)[3] if index < len(self.free) else None


class OutOfMemory(Exception):
    """The device is full, even after all cached segments have been given back."""


class CachingAllocator:
    """Bytes of one device.

    Args:
        capacity: bytes that the device can give; None: any number.

    Attributes:
        allocated, reserved: now; `peak_allocated`, `peak_reserved`: the largest so far.
        retries: how often cached segments had to be given back to go on; each one stalls a real run.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._capacity, self._expandable = capacity, expandable
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._owned: dict[int, Block] = {}
        self._segments = 0

    def allocate(self, key: int, size: int, stream: int) -> None:
        """Raises: OutOfMemory."""
        size = max(UNIT, round_up(size, UNIT))
        is_small = size <= SMALL
        pool = self._pools.setdefault((stream, is_small), Pool(is_small))
        block = pool.take(size) or (self._extend(pool, size) if self._expandable else self._new_segment(pool, size))
        rest = block.size - size
        if rest >= UNIT if is_small or self._expandable else rest > SMALL:
            self._split(block, size)
        block.is_free = False
        self._owned[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        block = self._owned.pop(key)
        self.allocated -= block.size
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                block.pool.remove(other)
                block = _join(other, block) if other is block.before else _join(block, other)
        if self._expandable and block.after is None:
            block.pool.last = block
        block.pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.segment, block.address + size, block.size - size, block.pool, True, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        elif self._expandable:
            block.pool.last = rest
        block.after, block.size = rest, size
        block.pool.add(rest)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        segment = SMALL_PAGE if pool.is_small else LARGE_PAGE if size < LARGE else round_up(size, ROUND_LARGE)
        self._reserve(segment)
        self._segments += 1
        return Block(self._segments, 0, segment, pool)

    def _extend(self, pool: Pool, size: int) -> Block:
        page, last = SMALL_PAGE if pool.is_small else LARGE_PAGE, pool.last
        if last is not None and last.is_free:
            more = round_up(size - last.size, page)
            self._reserve(more)
            pool.remove(last)
            last.size += more
            return last
        self._reserve(round_up(size, page))
        if last is None:
            self._segments += 1
            pool.last = Block(self._segments, 0, round_up(size, page), pool)
        else:
            pool.last = Block(last.segment, last.address + last.size, round_up(size, page), pool, before=last)
            last.after = pool.last
        return pool.last

    def _reserve(self, size: int) -> None:
        if self._capacity is not None and self.reserved + size > self._capacity:
            self.retries += 1
            self._give_back()
            if self.reserved + size > self._capacity:
                raise OutOfMemory(
                    f"{size} more bytes do not fit: of {self._capacity}, {self.reserved} are reserved and "
                    f"{self.allocated} allocated"
                )
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """All segments that are wholly free; of expandable ones the free pages."""
        for pool in self._pools.values():
            page = SMALL_PAGE if pool.is_small else LARGE_PAGE
            for *_, block in list(pool.free):
                if self._expandable:
                    if block is pool.last and (cut := block.size // page * page):
                        self._shorten(block, cut)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _shorten(self, last: Block, size: int) -> None:
        pool = last.pool
        pool.remove(last)
        self.reserved -= size
        last.size -= size
        if last.size:
            pool.add(last)
            return
        pool.last = last.before
        if last.before is not None:
            last.before.after = None


def _join(low: Block, high: Block) -> Block:
    low.size += high.size
    low.after = high.after
    if high.after is not None:
        high.after.before = low
    return low


@dataclass(frozen=True)
class Replay:
    """What a sequence of allocations makes of the device.

    Attributes:
        fits: whether it ran to its end; if not, the peaks are those before it failed.
    """

    peak_allocated: int
    peak_reserved: int
    retries: int
    fits: bool


def replay(
    events: Iterable[tuple[int, int, int, int]], capacity: int | None = None, *, expandable: bool = True
) -> Replay:
    """Run (+1 or -1, key, bytes, stream) through the allocator.

    Args:
        expandable: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    """
    allocator = CachingAllocator(capacity, expandable=expandable)
    fits = True
    try:
        for sign, key, size, stream in events:
            if sign > 0:
                allocator.allocate(key, size, stream)
            else:
                allocator.free(key)
    except OutOfMemory:
        fits = False
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.retries, fits)
