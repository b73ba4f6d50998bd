import itertools
import multiprocessing
import warnings

import numpy as np
import pytest
import torch

from titan_like.config.errors import ConfigError
from titan_like.data.loader import Batch, BatchSource, evaluation_batches


class Numbered:
    """Sample k is k*100, k*100+1, ...: every token tells which sample it is of."""

    seq_len = 3

    def __init__(self, samples: int = 10**6, broken_at: int = -1):
        self.samples, self.broken_at = samples, broken_at

    def __len__(self):
        return self.samples

    def __getitem__(self, k):
        if k == self.broken_at:
            raise ConfigError(f"sample {k} is unreadable")
        return k * 100 + np.arange(4, dtype=np.int64)


def source(rank=0, ranks=1, local=1, total=4, workers=0, dataset=None):
    dataset = dataset or Numbered()
    return BatchSource(
        dataset, local_batch_size=local, global_batch_size=total, dp_rank=rank, dp_size=ranks, num_workers=workers
    )


def ids(batches):
    return [(batch.tokens[:, 0] // 100).tolist() for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def test_fields_of_a_batch():
    (batch,) = source(local=2, total=2).next_step()
    assert batch.tokens.tolist() == [[0, 1, 2], [100, 101, 102]]
    assert batch.labels.tolist() == [[1, 2, 3], [101, 102, 103]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions)} == {torch.int64}
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()


class Documents:
    """[1,2,0] and [5,6,0] in a row of S=6, and the first token of the document after them."""

    seq_len = 6

    def __len__(self):
        return 1

    def __getitem__(self, k):
        return np.array([[1, 2, 0, 5, 6, 0, 7], [0, 0, 0, 3, 3, 3, 6]])


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("eod", [False, True])
def test_r012_r013_masks_are_chosen_apart(mask, positions, eod):
    made = BatchSource(
        Documents(), local_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1,
        reset_attention_mask=mask, reset_position_ids=positions, eod_mask_loss=eod,
    )  # fmt: skip
    (batch,) = made.next_step()
    # the label after each document's last token (0) is ignored, also at the end of the row; the 0 itself is predicted
    assert batch.labels.tolist() == [[2, 0, -100, 6, 0, -100] if mask or eod else [2, 0, 5, 6, 0, 7]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2] if positions else [0, 1, 2, 3, 4, 5]]
    assert (batch.starts is not None) == mask and (not mask or batch.starts.tolist() == [[0, 0, 0, 3, 3, 3]])
    assert batch.lengths == (((3, 3),) if mask else ()) and (batch.documents() is not None) == mask
    (evaluated,) = evaluation_batches(Documents(), 1, 1, 0, 1, mask, positions, eod)
    assert evaluated.labels.tolist() == batch.labels.tolist()
    assert batch.tokens.tolist() == evaluated.tokens.tolist() == [[1, 2, 0, 5, 6, 0]]  # ignored labels are read


def test_what_a_batch_tells_of_its_documents() -> None:
    lengths = ((2, 1, 3), (6,), (1, 5), (1, 1, 1, 3))
    batch = Batch(*(torch.zeros(4, 6, dtype=torch.int64),) * 4, lengths=lengths)
    for rows, most in ((None, 10), (2, 6), (1, 4)):  # documents: 3 + 1 + 2 + 4, 3 + 1 or 2 + 4, one of them
        assert batch.documents(rows)[1:] == (most, 6)


@pytest.mark.parametrize("workers", [0, 1])
def test_r110_the_end_of_the_data_is_the_same_step_on_all_ranks(workers):
    # 11 samples, 4 per step: 2 steps, 3 samples unused
    def parts(consumed=0):
        made = [
            BatchSource(
                Numbered(samples=11), local_batch_size=1, global_batch_size=4, dp_rank=rank, dp_size=2, stop=True,
                num_workers=workers,
            )
            for rank in range(2)
        ]  # fmt: skip
        for part in made:
            part.load_state_dict({"consumed_samples": consumed})
        return made

    both = parts()
    for left in (2, 1):
        assert [part.steps_left for part in both] == [left, left]
        for part in both:
            part.next_step()
    for part in both:
        assert part.steps_left == 0 and part.samples - part.consumed == 3
        with pytest.raises(StopIteration, match="8 of 11"):
            part.next_step()
        part.close()
    assert [part.steps_left for part in parts(4)] == [1, 1]
    assert source().steps_left is None  # repeats
    with pytest.raises(ConfigError, match=r"11 samples, fewer than the 12 of one step.*on_exhausted"):
        BatchSource(Numbered(samples=11), local_batch_size=1, global_batch_size=12, dp_rank=0, dp_size=1, stop=True)


def test_the_ids_of_a_step_are_those_that_were_read():
    made = source(rank=1, ranks=2, local=2, total=8)
    for _ in range(2):
        batches = made.next_step()
        assert made.last_ids.tolist() == ids(batches)


def test_global_order_over_ranks_and_accumulation():
    # step s = 1 has the samples 8..15; micro-batch m of rank r begins at 8 + (m*2 + r)*2
    sources = [source(rank=r, ranks=2, local=2, total=8) for r in range(2)]
    assert [s.accumulation for s in sources] == [2, 2]
    for s in sources:
        s.next_step()
    assert ids(sources[0].next_step()) == [[8, 9], [12, 13]]
    assert ids(sources[1].next_step()) == [[10, 11], [14, 15]]


@pytest.mark.parametrize("workers", [0, 2])
def test_r044_r049_r055_resume_is_exact_any_number_of_times(workers):
    straight = source(local=1, total=4, workers=0)
    expected = [ids(straight.next_step()) for _ in range(10)]
    assert flat(flat(expected)) == list(range(40))
    seen, state = [], {"consumed_samples": 0}
    for stop in (3, 5, 6, 7, 10):
        part = source(local=1, total=4, workers=workers)
        part.load_state_dict(state)
        seen += [ids(part.next_step()) for _ in range(stop - len(seen))]
        state = part.state_dict()
        assert state == {"consumed_samples": 4 * stop}  # absolute, and without what the workers have read ahead
        part.close()
    assert seen == expected


def test_r045_r056_other_ranks_workers_and_micro_batches_go_on_with_the_same_samples():
    first = source(local=4, total=8, workers=1)
    first.next_step()
    state = first.state_dict()
    first.close()
    for ranks, local in ((1, 1), (2, 4), (4, 2), (8, 1)):
        parts = [source(rank=r, ranks=ranks, local=local, total=8) for r in range(ranks)]
        for part in parts:
            part.load_state_dict(state)
        for step in (1, 2):
            seen = flat(flat(ids(part.next_step()) for part in parts))
            assert sorted(seen) == list(range(8 * step, 8 * step + 8))
    other = source(local=1, total=3)  # another global batch goes on at the same sample
    other.load_state_dict(state)
    assert ids(other.next_step()) == [[8], [9], [10]]


def test_state_can_be_loaded_in_the_middle():
    s = source(local=4, workers=1)
    s.next_step()
    s.load_state_dict({"consumed_samples": 400})
    assert ids(s.next_step()) == [[400, 401, 402, 403]]
    s.close()
    assert ids(s.next_step()) == [[404, 405, 406, 407]]  # closing stops the workers, not the order
    s.close()
    with pytest.raises(ValueError, match="-1"):
        s.load_state_dict({"consumed_samples": -1})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reading_error_reaches_the_caller_and_keeps_the_position(workers):
    s = source(local=2, total=4, workers=workers, dataset=Numbered(broken_at=7))
    s.next_step()
    for _ in range(2):
        with pytest.raises(ConfigError, match="sample 7 is unreadable"):
            s.next_step()
    assert s.state_dict() == {"consumed_samples": 4}
    s.close()


def test_close_ends_the_workers():
    before = set(multiprocessing.active_children())
    s = source(workers=2)
    s.next_step()
    assert len(set(multiprocessing.active_children()) - before) == 2
    s.close()
    assert set(multiprocessing.active_children()) - before == set()


def test_no_warning_and_no_draw_from_the_global_generator():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source().next_step()
    assert torch.equal(torch.rand(2), expected)


def test_batch_sizes_that_do_not_divide():
    with pytest.raises(ConfigError, match=r"global_batch_size \(6\).*\(2\).*ranks \(2\).*multiple of 4"):
        source(ranks=2, local=2, total=6)
    with pytest.raises(ConfigError, match="positive"):
        source(total=0)


def test_evaluation_fills_up_with_ignored_labels():
    # 5 samples, 2 ranks x 2 sequences: round 0 has 0..3, round 1 has 4 on rank 0 and nothing on rank 1
    batches = [list(evaluation_batches(Numbered(), 5, 2, rank, 2)) for rank in range(2)]
    assert [len(b) for b in batches] == [2, 2]
    assert [ids(b) for b in batches] == [[[0, 1], [4, 0]], [[2, 3], [0, 0]]]
    valid = [[(b.labels != -100).sum(dim=1).tolist() for b in rank] for rank in batches]
    assert valid == [[[3, 3], [3, 0]], [[3, 3], [0, 0]]]


@pytest.mark.parametrize("local", [1, 2])
def test_filled_up_places_are_tokens_of_the_vocabulary(local):
    (batch,) = evaluation_batches(Numbered(), 1, local, 1, 2)
    assert (batch.labels == -100).all() and (batch.tokens == 0).all()


@pytest.mark.parametrize("local", [1, 2])
def test_tensors_of_a_batch_share_no_memory(local):
    (batch,) = source(local=local, total=local).next_step()
    tensors = (batch.tokens, batch.labels, batch.positions)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 3


def test_evaluation_ends_with_the_data_on_every_rank():
    for samples, expected in ((3, [[6], [3]]), (5, [[6, 3], [6, 0]])):  # labels that count, 2 sequences of 3 per batch
        dataset = Numbered(samples=samples)
        batches = [list(evaluation_batches(dataset, 10**12, 2, rank, 2)) for rank in range(2)]
        assert [[(b.labels != -100).sum().item() for b in rank] for rank in batches] == expected
    assert list(evaluation_batches(Numbered(), 0, 2, 0, 2)) == []
