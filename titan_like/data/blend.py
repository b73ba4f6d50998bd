"""Which of several sets each sample of a run comes from: Megatron's blend, without end.

Source of the rule: NVIDIA/Megatron-LM, megatron/core/datasets/helpers.cpp, build_blending_indices. Sample k comes from
the set that is furthest behind its share, weight * k; of equals, the first. There is no randomness in it.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

BLOCK = 100_000  # samples; ticking it changes the order of every blend with other weights than multiples of 1e-5


class BlendOrder:
    """(set, sample of that set) as a pure function of (weights, k), at the same cost for every k.

    Megatron's rule needs all choices before k. To start anywhere, the choices of each set up to a multiple of BLOCK are
    fixed in advance (`_quota`); inside a block the rule is applied among the sets that have not reached theirs. For
    weights that are multiples of 1e-5 this is Megatron's order throughout, for others some choices next to the end of
    a block differ. Shares are kept to about one sample at every k, whatever the weights.

    Args:
        weights: > 0, of any sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))
        self._block = -1

    def locate(self, k: int) -> tuple[int, int]:
        """(set, number of the sample in that set) of sample k >= 0."""
        at = self._enter(k)
        return int(self._sets[at]), int(self._numbers[at])

    def counts(self, k: int) -> np.ndarray:
        """(sets,) int64: how many of the first k samples come from each set."""
        at = self._enter(k)
        return self._quota(k - at) + np.bincount(self._sets[:at], minlength=len(self.weights))

    def first_beyond(self, sizes: Sequence[int]) -> int:
        """The smallest k whose sample is number `sizes[d]` or later of its set d: where the first set has run out."""
        limits = np.array(sizes)
        blocks = range(int(((limits + 2) / self.weights).min()) // BLOCK + 1)  # by then a quota is above its limit
        block = bisect_left(blocks, True, key=lambda b: bool((self._quota((b + 1) * BLOCK) > limits).any()))
        self._enter(block * BLOCK)
        return block * BLOCK + int(np.argmax(self._numbers >= limits[self._sets]))

    def _quota(self, k: int) -> np.ndarray:
        """(sets,) int64 that add up to k and never fall with growing k: Webster's apportionment of k samples."""
        counts = np.floor(self.weights * k + 0.5).astype(np.int64)
        while (missing := k - int(counts.sum())) != 0:
            if missing > 0:
                counts[np.argmin((counts + 0.5) / self.weights)] += 1
            else:
                keys = (counts - 0.5) / self.weights
                counts[len(keys) - 1 - np.argmax(keys[::-1])] -= 1
        return counts

    def _enter(self, k: int) -> int:
        """Make the block of sample k the current one; returns the place in it."""
        block, at = divmod(k, BLOCK)
        if block != self._block:
            before = self._quota(block * BLOCK)
            self._sets = np.array(
                self._choose(block * BLOCK, before.tolist(), self._quota((block + 1) * BLOCK).tolist())
            )
            self._numbers = np.empty(BLOCK, np.int64)
            for chosen, count in enumerate(before):
                places = np.flatnonzero(self._sets == chosen)
                self._numbers[places] = count + np.arange(len(places))
            self._block = block
        return at

    def _choose(self, first: int, counts: list[int], limits: list[int]) -> list[int]:
        """The sets of one block in order. Plain Python: each choice depends on all before it."""
        weights = self.weights.tolist()
        within = [d for d in range(len(counts)) if counts[d] < limits[d]]
        chosen = []
        for k in range(first, first + BLOCK):
            behind, most = -1, -np.inf
            for d in within:
                error = weights[d] * max(k, 1) - counts[d]
                if error > most:
                    behind, most = d, error
            chosen.append(behind)
            counts[behind] += 1
            if counts[behind] == limits[behind]:
                within.remove(behind)
        return chosen
