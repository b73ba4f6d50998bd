import random
import time

import numpy as np
import pytest

from titan_like.config.errors import ConfigError
from titan_like.data.order import SampleOrder, locate


def walk(lengths: list[int], order: list[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Megatron's loop, step by step: every sample takes S+1 tokens and the next one starts at the last of them."""
    stream = [(document, offset) for document in order for offset in range(lengths[document])]
    samples = []
    for start in range(0, len(stream) - seq_len, seq_len):
        pieces: list[tuple[int, int, int]] = []
        for document, offset in stream[start : start + seq_len + 1]:
            if pieces and pieces[-1][0] == document:
                pieces[-1] = (document, pieces[-1][1], offset + 1)
            else:
                pieces.append((document, offset, offset + 1))
        samples.append(pieces)
    return samples


def test_golden_sample_index():
    lengths, order = np.array([5, 3, 7, 1]), [2, 0, 3, 1]
    places, offsets = locate(np.append(0, np.cumsum(lengths[order])), np.array([0, 4, 8, 12]))
    assert np.stack([places, offsets], axis=1).tolist() == [[0, 0], [0, 4], [1, 1], [2, 0]]


def test_golden_shuffle():
    # RandomState(1234): documents [2,1,6,0,4,5,3,7], then six samples [0,4,3,2,5,1]: 13 tokens, S=2.
    lengths = np.array([1, 1, 1, 1, 1, 1, 1, 6])
    order = SampleOrder(lengths, 2, 1234)
    assert order.samples_per_epoch == 6
    samples = walk(lengths.tolist(), [2, 1, 6, 0, 4, 5, 3, 7], 2)
    assert [order.pieces(k) for k in range(6)] == [samples[j] for j in [0, 4, 3, 2, 5, 1]]
    assert order.pieces(0) == [(2, 0, 1), (1, 0, 1), (6, 0, 1)]
    assert order.pieces(1) == [(7, 1, 4)]


def test_equals_a_plain_walk_on_random_cases():
    rng = random.Random(0)
    for _ in range(60):
        lengths = [rng.choice([0, 1, 2, 3, 9, 20]) for _ in range(rng.randint(1, 12))]
        seq_len = rng.randint(1, 12)
        if sum(lengths) < seq_len + 1:
            continue
        seed, epoch = rng.randint(0, 99), rng.randint(0, 3)
        order = SampleOrder(np.array(lengths, np.int32), seq_len, seed)
        n = (sum(lengths) - 1) // seq_len
        state = np.random.RandomState(seed + epoch)
        documents, samples = np.arange(len(lengths)), np.arange(n)
        state.shuffle(documents)
        state.shuffle(samples)
        expected = walk(lengths, documents.tolist(), seq_len)
        assert order.samples_per_epoch == n == len(expected)
        assert [order.pieces(epoch * n + k) for k in range(n)] == [expected[j] for j in samples]


def test_plain_order_repeats():
    order = SampleOrder(np.array([3, 4]), 2, seed=5, shuffle=False)
    epoch = [[(0, 0, 3)], [(0, 2, 3), (1, 0, 2)], [(1, 1, 4)]]
    assert [order.pieces(k) for k in range(6)] == epoch + epoch


def test_r035_r053_each_epoch_has_its_own_order():
    lengths = np.full(13, 10)
    epochs = []
    for epoch in range(3):
        order = SampleOrder(lengths, 10, seed=3)  # made anew: nothing but k decides
        n = order.samples_per_epoch
        epochs.append([order.pieces(epoch * n + k) for k in range(n)])
    assert n == 12
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    order = SampleOrder(lengths, 10, seed=3)
    assert [order.pieces(k) for k in range(36)] == epochs[0] + epochs[1] + epochs[2]
    for samples in epochs:  # every token but the dropped tail, and each sample's first token is its neighbour's last
        tokens = [(d, t) for pieces in samples for d, lo, hi in pieces for t in range(lo, hi)]
        assert len(tokens) == 12 * 11 and len(set(tokens)) == 121


def test_far_samples_and_large_seeds_are_defined():
    order = SampleOrder(np.array([50]), 4, seed=2**40 + 7)
    assert order.pieces(12 * 10**9) == SampleOrder(np.array([50]), 4, seed=7).pieces(12 * 10**9)
    with pytest.raises(IndexError):
        order.pieces(-1)


@pytest.mark.parametrize("lengths", [[], [0], [10, 10]])
def test_r036_too_little_data(lengths):
    with pytest.raises(ConfigError, match=rf"{sum(lengths)} tokens.* 65 "):
        SampleOrder(np.array(lengths, np.int32), 64, 0)
    assert SampleOrder(np.array([65]), 64, 0).samples_per_epoch == 1


def test_a_million_documents_are_fast():
    order = SampleOrder(np.full(1_000_000, 1000, np.int32), 2048, 0)
    start = time.perf_counter()
    assert sum(hi - lo for _, lo, hi in order.pieces(400_000)) == 2049
    assert time.perf_counter() - start < 3
