"""Which part of a sequence each context-parallel rank holds, and which keys its queries see."""

import pytest
import torch

from titan_like.models.decoder import document_mask
from titan_like.parallel.context import local_index


@pytest.mark.parametrize(
    ("load_balance", "expected"),
    [(False, [[0, 1, 2, 3], [4, 5, 6, 7]]), (True, [[0, 1, 6, 7], [2, 3, 4, 5]])],
)
def test_parts_of_a_row_of_eight(load_balance: bool, expected: list[list[int]]) -> None:
    assert [local_index(8, 2, rank, load_balance=load_balance).tolist() for rank in range(2)] == expected


def test_load_balance_gives_equal_work() -> None:
    """Under a causal mask query i sees i + 1 keys."""
    work = [(local_index(64, 4, rank, load_balance=True) + 1).sum().item() for rank in range(4)]
    assert work == [64 * 65 / 2 / 4] * 4


def test_mask_of_two_documents() -> None:
    """Documents of 2 and 3 tokens, whole row: block-diagonal and causal."""
    starts = torch.tensor([[0, 0, 2, 2, 2]])
    index = torch.arange(5)
    expected = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool
    )
    assert torch.equal(document_mask(starts, index, index)[0, 0], expected)
    part = torch.tensor([1, 3])  # the mask of a part of the queries is those rows of it, in the keys' order
    order = torch.tensor([4, 0, 1, 2, 3])
    assert torch.equal(document_mask(starts[:, part], part, order)[0, 0], expected[part][:, order])
