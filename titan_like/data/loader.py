"""Batches for the training step, carried by torchdata's StatefulDataLoader; the only module of `data` with torch.

What a row becomes: S+1 tokens give S inputs and the S labels after them, shifted once, here. Labels that must not count
are IGNORED_LABEL, by position and never by the value of a token. Whether labels across documents count, what a token
sees and where its position counts from are chosen apart; only a reset attention mask takes the labels with it.

One global order, one integer of state. Optimizer step s of a run takes the samples [s*G, (s+1)*G) of the dataset, with
G = `global_batch_size`; of these, micro-batch m of data-parallel rank r holds the samples
s*G + (m*dp_size + r)*local_batch_size + i. A position is the number of samples consumed by all ranks together, so a run
may go on with another number of ranks, workers or sequences per micro-batch and still sees every sample once, in order.
"""

import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_like.config.errors import ConfigError
from titan_like.models.documents import Documents, document_lengths

IGNORED_LABEL = -100
Read = tuple[Tensor, Tensor] | ConfigError  # the ids of a micro-batch's samples and its rows, or why it has none


class SampleSource(Protocol):
    """What a dataset must offer, e.g. `TokenDataset`."""

    @property
    def seq_len(self) -> int: ...

    def __len__(self) -> int:
        """Samples of one epoch."""

    def __getitem__(self, k: int, /) -> np.ndarray:
        """Sample k >= 0 of the run, of any epoch: (S+1,) int64 tokens, or (2, S+1): tokens and document starts."""

    def place(self, k: int, at: int, /) -> str:
        """Where token `at` of sample k comes from, for people; only called for an id outside the vocabulary."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank; tensors are int64, on one device."""

    tokens: Tensor  # (B, S)
    labels: Tensor  # (B, S), labels[:, i] is the token after tokens[:, i]; IGNORED_LABEL never counts
    positions: Tensor  # (B, S), for rotary embeddings
    starts: Tensor | None = (
        None  # (B, S), index in the row of the first token of each token's document; None: row = document
    )
    lengths: tuple[tuple[int, ...], ...] = ()  # with `starts`: the tokens of each document of each row

    def documents(self, rows: int | None = None) -> Documents | None:
        """What the model needs to keep documents apart, in all rows or in any micro-batch of so many `rows`."""
        if self.starts is None:
            return None
        size = rows or len(self.lengths)
        parts = [self.lengths[first : first + size] for first in range(0, len(self.lengths), size)]
        return Documents(self.starts, max(sum(map(len, part)) for part in parts), max(map(max, self.lengths)))


class BatchSource:
    """This rank's micro-batches, one optimizer step at a time, for ever (a new order for each epoch) or for one epoch.

    Args:
        dataset: numbered samples; each worker process gets its own copy.
        local_batch_size: sequences per micro-batch of one data-parallel rank.
        global_batch_size: sequences per optimizer step over all ranks.
        reset_attention_mask, reset_position_ids, eod_mask_loss: keep documents apart (needs a dataset that says where
            they start): `starts` is set and no label crosses into another document; positions count from there; no
            label crosses, whatever the mask.
        stop: end with the last whole step of one epoch.
        num_workers: processes that read ahead; 0 reads in this process.
        device: where the batches go; None leaves them on the CPU.
        vocab_size: of the model; an id outside it is refused when it is read. None: not looked at.
    Raises:
        ConfigError: global_batch_size is no multiple of local_batch_size * dp_size, or with `stop` more than the data.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        local_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        reset_attention_mask: bool = False,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        stop: bool = False,
        num_workers: int = 0,
        device: torch.device | str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if global_batch_size <= 0 or global_batch_size % (local_batch_size * dp_size):
            raise ConfigError(
                f"global_batch_size ({global_batch_size}) is not a positive multiple of local_batch_size "
                f"({local_batch_size}) x data-parallel ranks ({dp_size}); "
                f"choose a multiple of {local_batch_size * dp_size}"
            )
        self.samples = len(dataset) if stop else None
        if self.samples is not None and self.samples < global_batch_size:
            raise ConfigError(
                f"the data have {self.samples} samples, fewer than the {global_batch_size} of one step "
                "(training.global_batch_size); add data, lower it, or set data.on_exhausted to repeat"
            )
        self.dataset = dataset
        self.local_batch_size = local_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.resets = reset_attention_mask, reset_position_ids, eod_mask_loss
        self.num_workers = num_workers
        self.device = torch.device("cpu" if device is None else device)
        self.last_ids = torch.empty(0, dtype=torch.int64)  # of the last step: (accumulation, local_batch_size)
        self._consumed = 0
        self._reader = _Reader(dataset, vocab_size)
        self._rows: Iterator[Read] | None = None

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size // (self.local_batch_size * self.dp_size)

    @property
    def consumed(self) -> int:
        """Samples that `next_step` has handed out on all ranks."""
        return self._consumed

    @property
    def samples_left(self) -> int | None:
        """Samples until the data are exhausted, the same on every rank; None: no end."""
        return None if self.samples is None else max(self.samples - self._consumed, 0)

    @property
    def steps_left(self) -> int | None:
        """Whole steps among them."""
        return None if self.samples_left is None else self.samples_left // self.global_batch_size

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step; an error raised in a worker is raised here.

        Raises:
            StopIteration: no step is left.
            ConfigError: a token id is not in the vocabulary; shard, document and id are named.
        """
        if self.samples is not None and self._consumed + self.global_batch_size > self.samples:
            raise StopIteration(f"{self._consumed} of {self.samples} samples are read: none are left for a whole step")
        if self._rows is None:
            self._rows = iter(self._open_loader())
        try:
            read = [_checked(next(self._rows)) for _ in range(self.accumulation)]
            step = [_to_batch(rows, self.device, *self.resets) for _, rows in read]
        except BaseException:
            self.close()  # a second try starts at the same step, not in the middle of it
            raise
        self.last_ids = torch.stack([ids for ids, _ in read])
        self._consumed += self.global_batch_size
        return step

    def state_dict(self) -> dict[str, int]:
        """The position: samples that `next_step` has handed out on all ranks; what workers read ahead is not in it."""
        return {"consumed_samples": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, possibly saved with other ranks, workers or batch sizes."""
        consumed = operator.index(state["consumed_samples"])
        if consumed < 0:
            raise ValueError(f"consumed_samples must be >= 0, not {consumed}")
        self.close()
        self._consumed = consumed

    def close(self) -> None:
        """Stop the workers and drop what they have read ahead; the position stays."""
        self._rows = None

    def _open_loader(self) -> StatefulDataLoader:
        with warnings.catch_warnings():
            # torchdata 0.11 still calls it; torch 2.13 deprecates it without replacement.
            warnings.filterwarnings("ignore", message=".*set_vital.*")
            return StatefulDataLoader(
                self._reader,
                batch_sampler=_MicroBatchIds(
                    self._consumed, self.local_batch_size, self.global_batch_size, self.dp_rank, self.dp_size
                ),
                collate_fn=_as_it_is,
                num_workers=self.num_workers,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # else opening the loader would draw from torch's global generator
            )


@dataclass(frozen=True)
class _Reader:
    """What a loader process does: all rows of a micro-batch at once, with their numbers."""

    dataset: SampleSource
    vocab_size: int | None

    def __getitems__(self, ids: list[int]) -> Read:
        """A user's error is handed over as it is: torch would add the worker's traceback to its sentence."""
        try:
            rows = np.stack([self.dataset[k] for k in ids])
            self.check(ids, rows)
        except ConfigError as error:
            return error
        return torch.from_numpy(np.array(ids)), torch.from_numpy(rows)

    def check(self, ids: Sequence[int], rows: np.ndarray) -> None:
        """Refuse ids outside the vocabulary, which an embedding could only meet with an error of its kernel."""
        tokens = rows if rows.ndim == 2 else rows[:, 0]
        # As unsigned numbers, so that one comparison finds negative ids too.
        if self.vocab_size is None or tokens.view(np.uint64).max() < self.vocab_size:
            return
        row, at = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0].tolist()
        place = self.dataset.place(ids[row], at)
        raise ConfigError(
            f"{place} has the token id {tokens[row, at]}, but the model's vocabulary has the ids 0 "
            f"to {self.vocab_size - 1}; prepare the data again or raise the model's vocabulary"
        )


@dataclass(frozen=True)
class _MicroBatchIds:
    """The sample ids of one rank's micro-batches from a global position on, without end."""

    start: int
    local_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        for step_start in itertools.count(self.start, self.global_batch_size):
            for first in range(0, self.global_batch_size, self.dp_size * self.local_batch_size):
                begin = step_start + first + self.dp_rank * self.local_batch_size
                yield list(range(begin, begin + self.local_batch_size))


def evaluation_batches(
    dataset: SampleSource,
    num_samples: int,
    local_batch_size: int,
    dp_rank: int,
    dp_size: int,
    reset_attention_mask: bool = False,
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
    device: torch.device | str | None = None,
    vocab_size: int | None = None,
) -> Iterator[Batch]:
    """Samples [0, num_samples) of the first epoch in order, fewer if there are fewer, as equally many batches on every
    rank.

    Places without a sample, in the last batches, hold zeros with IGNORED_LABEL as labels.

    Raises:
        ConfigError: as BatchSource.next_step.
    """
    target = torch.device("cpu" if device is None else device)
    available = min(num_samples, len(dataset))
    filler = np.zeros_like(dataset[0])
    reader = _Reader(dataset, vocab_size)
    for first in range(0, available, dp_size * local_batch_size):
        begin = first + dp_rank * local_batch_size
        ids = range(begin, begin + local_batch_size)
        rows = np.stack([dataset[k] if k < available else filler for k in ids])
        reader.check(ids, rows)
        batch = _to_batch(torch.from_numpy(rows), target, reset_attention_mask, reset_position_ids, eod_mask_loss)
        batch.labels[max(0, available - begin) :] = IGNORED_LABEL
        yield batch


def _as_it_is(read: Read) -> Read:
    return read


def _checked(read: Read) -> tuple[Tensor, Tensor]:
    if isinstance(read, ConfigError):
        raise read
    return read


def _to_batch(
    rows: Tensor, device: torch.device, reset_attention_mask: bool, reset_position_ids: bool, eod_mask_loss: bool
) -> Batch:
    """rows: (B, S+1) tokens, or (B, 2, S+1) tokens and document starts."""
    moved = rows.to(device, non_blocking=True)
    tokens = moved if rows.ndim == 2 else moved[:, 0]
    labels = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # written to, below and by evaluation
    positions = torch.arange(labels.shape[1], device=device).repeat(labels.shape[0], 1)
    if reset_attention_mask or reset_position_ids or eod_mask_loss:
        if rows.ndim == 2:
            raise ValueError("to keep documents apart, a dataset must say where they start: rows (B, 2, S+1)")
        next_starts, starts = moved[:, 1, 1:], moved[:, 1, :-1].contiguous()
        if reset_attention_mask or eod_mask_loss:
            labels.masked_fill_(next_starts != starts, IGNORED_LABEL)
        if reset_position_ids:
            positions -= starts
    batch = Batch(tokens[:, :-1].contiguous(), labels, positions)
    if not reset_attention_mask:
        return batch
    return replace(batch, starts=starts, lengths=document_lengths(rows[:, 1, :-1]))
