"""What ring attention holds on the first rank of a group beside what it reads and returns.

Source: torch 2.13, _context_parallel/_attention.py (_templated_ring_attention and its backward, _SDPAMerger, the two
rotaters), whose variables hold what they were last given; titan_like/parallel/context.py repeats heads inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """Sizes are bytes of one rank in the compute dtype.

    A kernel runs for the rank's own block of keys, then for those of the others as they come. With balance a later one
    takes half of the queries; without, the first rank skips all but its own.

    Attributes:
        q, k: queries, keys (and values); `number`: of one number.
        cp: blocks.
        gathers: keys and values of all ranks come at once, else one block after the other.
        repeats: kernels work on repeated heads.
        copies: keys have several heads, so that they are copied before they travel; `copies_queries`: queries.
    """

    q: int
    k: int
    number: int
    cp: int
    gathers: bool
    balanced: bool
    repeats: bool
    copies: bool
    copies_queries: bool

    @property
    def work(self) -> tuple[int, int]:
        """The most at any time: in the forward, in the backward."""
        return max(self._forward()) - self.q, max(self._backward()) - self.q - self._pair

    @property
    def _pair(self) -> int:
        """Keys and values of a block, laid together."""
        return 2 * self.k

    @property
    def _own(self) -> int:
        """Contiguous copies of the rank's own."""
        return self._pair * self.copies

    @property
    def _repeated(self) -> int:
        return 2 * self.q * self.repeats

    def _wide(self, size: int) -> int:
        return size // self.number * 4

    @property
    def _rounded(self) -> int:
        """A result beside its fp32 copy."""
        return self.q if self.number < 4 else 0

    @property
    def _later(self) -> range:
        """Later blocks that differ; the fourth and all others are as the third, the last one holds less."""
        return range(1, min(self.cp, 3))

    def _travels(self, block: int) -> int:
        """What has come, and what is on its way."""
        if self.gathers:
            return self.cp * self._pair
        return self._pair * ((block > 0) + (block < self.cp - 1))

    def _before(self, block: int) -> int:
        """What the kernel before has read, until the next one does; a part of what was gathered is a view."""
        return self._own if block == 1 or not self.balanced else self._pair * (not self.gathers)

    def _forward(self) -> Iterator[int]:
        wide, own, pair = self._wide(self.q), self._own, self._pair
        yield own + self._travels(0) + pair
        yield own + self._travels(0) + self._repeated + self.q
        yield own + self._travels(0) + self._rounded + wide
        for block in self._later:
            done = wide + (self._rounded if block == 1 or not self.balanced else self.q // 2)
            if block < self.cp - 1:  # laid together, to be sent on
                yield self._before(block) + self._travels(block) + pair + done
            if self.balanced:
                yield self._travels(block) + done + self._repeated + self.q // 2
                yield self._travels(block) + self._rounded // 2 + 3 * wide  # merged: before, after, and the new half
        if not self.balanced:
            yield own + self._travels(self.cp - 1) + 2 * self._rounded + wide

    def _backward(self) -> Iterator[int]:
        own, pair = self._own, self._pair
        wide, wide_pair = self._wide(self.q), self._wide(pair)
        base = (
            self.q * self.copies_queries + wide + pair
        )  # gradient of the result, fp32 sum for the queries, what is sent
        kernel = self._repeated + (2 * self.q if self.repeats else pair) + pair  # gradients of heads, and their sums
        yield base + own + self._travels(0) + wide_pair + kernel + self.q
        base += 3 * wide_pair  # sums for keys and values: this rank's, laid together, and on their way
        for block in self._later:
            made = (self.q if block == 1 else self.q // 2) + pair
            if not self.balanced and block > 1:
                made = wide + wide_pair  # zeros, as for each block that is skipped
            if block < self.cp - 1:  # the next ones are laid together before the last go
                yield base + self._before(block) + self._travels(block) + pair * self.gathers + made
            if self.balanced:
                yield base + self._travels(block) + made + kernel + self.q // 2
            else:  # zeros take the place of one gradient after the other
                yield base + own + self._travels(block) + max(made + wide, wide + wide_pair + self.k)
        if not self.balanced:
            yield base + own + self._travels(self.cp - 1) + wide + wide_pair + self._rounded
