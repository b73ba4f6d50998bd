import numpy as np
import pytest

from tests.data.test_dataset import shard
from titan_like.config.errors import ConfigError
from titan_like.data.blend import BLOCK, BlendOrder
from titan_like.data.dataset import BlendedDataset, TokenDataset, check_data, open_training_data


def greedy(weights: list[float], size: int) -> list[int]:
    """Megatron's loop: the set that is furthest behind weight * max(k, 1); of equals, the first."""
    counts, chosen = [0] * len(weights), []
    for k in range(size):
        errors = [weight * max(k, 1) - count for weight, count in zip(weights, counts, strict=True)]
        chosen.append(errors.index(max(errors)))
        counts[chosen[-1]] += 1
    return chosen


@pytest.mark.parametrize(
    ("weights", "golden"),
    [
        ([0.5, 0.25, 0.25], [0, 1, 2, 0]),
        ([2, 1, 1], [0, 1, 2, 0]),  # of any sum
        ([0.3, 0.7], [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]),
        ([0.1, 0.2, 0.7], [2, 1, 2, 0, 2, 2, 1, 2, 2, 2, 0, 2, 1, 2]),
    ],
)
def test_golden_orders_of_megatron(weights: list[float], golden: list[int]) -> None:
    order = BlendOrder(weights)
    located = [order.locate(k) for k in range(len(golden))]
    assert [chosen for chosen, _ in located] == golden
    assert [number for _, number in located] == [golden[:k].count(chosen) for k, chosen in enumerate(golden)]


@pytest.mark.parametrize(("weights", "may_differ"), [([0.3, 0.7], 0), ([0.05, 0.2, 0.75], 0), ([1 / 3, 2 / 3], 2)])
def test_the_order_is_megatrons_across_blocks(weights: list[float], may_differ: int) -> None:
    size, order = BLOCK + 5000, BlendOrder(weights)
    assert sum(order.locate(k)[0] != chosen for k, chosen in enumerate(greedy(weights, size))) <= may_differ


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1 / 3, 2 / 3], [1, 1, 1], [8, 5, 1, 1, 1], [1e-6, 1]])
def test_every_set_gives_each_of_its_samples_once_and_keeps_its_share(weights: list[float]) -> None:
    order, seen = BlendOrder(weights), [0] * len(weights)
    for k in range(BLOCK - 300, BLOCK + 300):
        if k == BLOCK - 300:
            seen = order.counts(k).tolist()
        chosen, number = order.locate(k)
        assert number == seen[chosen]
        seen[chosen] += 1
        assert max(abs(np.array(seen) - order.weights * (k + 1))) < 1.5
    far = 10**9 + 12345
    assert order.counts(far).sum() == far and max(abs(order.counts(far) - order.weights * far)) < 1.5
    assert BlendOrder(weights).locate(far) == order.locate(far)  # nothing but k decides


def test_where_the_first_set_runs_out() -> None:
    # 0.9/0.1: set 1 comes as second sample (k = 1), then as 12th (k = 11); set 0 gives number 10 at k = 12
    assert BlendOrder([0.9, 0.1]).first_beyond([10, 1000]) == 12
    assert BlendOrder([0.5, 0.5]).first_beyond([10**6, 10**6]) == 2 * 10**6
    # weight 1/1,000,001: its share passes 1.5 samples in the block from 1,500,000 on, and there it is furthest behind
    assert BlendOrder([1e-6, 1]).first_beyond([1, 2 * 10**6]) == 1_500_000


def test_r024_a_small_set_is_repeated_as_often_as_its_weight_asks(tmp_path) -> None:
    small = shard(tmp_path / "small", [[d] * 4 for d in range(10)] + [[99]])  # 41 tokens: 10 samples of S=4
    large = shard(tmp_path / "large", [[1000 + d] * 4 for d in range(1000)] + [[99]])
    data = open_training_data([small, large], [0.9, 0.1], 4, seed=3, documents=False, repeat=True)
    rows = [data[k].tolist() for k in range(500)]
    from_small = [tuple(row) for row in rows if max(row[:2]) < 1000]
    assert abs(len(from_small) - 450) <= 1 and data.epochs(500) == {small: 45.0, large: 0.05}
    counts = [from_small.count(row) for row in dict.fromkeys(from_small[:10])]
    assert len(data.parts[0]) == 10 and sum(counts) <= len(from_small)
    alone = TokenDataset([small], 4, seed=3)
    assert from_small == [
        tuple(alone[j].tolist()) for j in range(len(from_small))
    ]  # its own epochs, one after the other
    order = [[alone._order.pieces(10 * epoch + j) for j in range(10)] for epoch in range(3)]
    assert order[0] != order[1] != order[2]  # a new shuffle in each


def test_an_epoch_of_a_blend_ends_where_a_set_does(tmp_path) -> None:
    a, b = shard(tmp_path / "a", [[1] * 9]), shard(tmp_path / "b", [[2] * 81])  # 2 and 20 samples of S=4
    data = open_training_data([a, b], [0.5, 0.5], 4, seed=0, documents=False, repeat=False)
    assert len(data) == 4 and [data[k][0] for k in range(4)] == [1, 2, 1, 2]
    assert "50.00% " in data.summary and "2 samples per epoch (0 tokens left over)" in data.summary


def test_the_identity_of_a_blend(tmp_path) -> None:
    def blend(names: str, weights: list[float]) -> str:
        parts = [TokenDataset([tmp_path / name], 4, seed=0) for name in names]
        return BlendedDataset(parts, weights).fingerprint

    for name in "ab":
        shard(tmp_path / name, [[ord(name)] * 9], documents=1)
    assert blend("ab", [1, 3]) == blend("ab", [0.25, 0.75])
    assert len({blend("ab", [1, 3]), blend("ab", [1, 2]), blend("ba", [1, 3])}) == 3


def test_sets_that_do_not_go_together(tmp_path) -> None:
    a = shard(tmp_path / "a", [[1] * 9], tokenizer_sha256="aa")
    b = shard(tmp_path / "b", [[1] * 9], tokenizer_sha256="bb")
    empty = shard(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="different tokenizers"):
        open_training_data([a, b], [1, 1], 4, seed=0, documents=False, repeat=True)
    with pytest.raises(ConfigError, match="the data have 0 tokens"):
        open_training_data([a, empty], [1, 1], 4, seed=0, documents=False, repeat=True)
    (problem,) = check_data([a, empty], 4, 300, None, blended=True, repeat=True)
    assert problem.startswith(f"{empty}: the data have 0 tokens")
    assert check_data([a, empty], 4, 300, None) == []  # as one set of documents an empty shard adds nothing
