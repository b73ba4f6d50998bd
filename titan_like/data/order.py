"""The order of samples: Megatron's GPTDataset for one epoch, with a new permutation in each epoch.

Source of the rule: NVIDIA/Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp (document index, sample
index, shuffle index). One epoch concatenates all documents in shuffled order; sample j covers the S+1 tokens from
token j*S on, so neighbours share one token; the samples are then shuffled. The partial last sample is dropped.
"""

from itertools import pairwise

import numpy as np

from titan_like.config.errors import ConfigError

Piece = tuple[int, int, int]  # document, first token, one past the last token


class SampleOrder:
    """Sample k of a run as a pure function of (lengths, seq_len, seed, k).

    Epoch e draws from `numpy.random.RandomState(seed + e)` (modulo 2**32), documents first, then samples. Without
    shuffling every epoch has the plain order. Memory: 12 bytes per document and 4 per sample of the current epoch.

    Args:
        lengths: (documents,) tokens per document; empty documents are allowed.
        seq_len: S; a sample has S+1 tokens.
        repeat: where the data are shorter than one sample, an epoch is as many passes over them as fill one.
    Attributes:
        samples_per_epoch: at least 1.
        tokens_left_over: per epoch, at the end of its documents: too few for one more sample.
    Raises:
        ConfigError: fewer than S+1 tokens, or none with `repeat`.
    """

    def __init__(
        self, lengths: np.ndarray, seq_len: int, seed: int, shuffle: bool = True, repeat: bool = False
    ) -> None:
        self.lengths = lengths
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < (1 if repeat else seq_len + 1):
            raise ConfigError(too_few_tokens(tokens, seq_len))
        self._passes = -(-(seq_len + 1) // tokens)
        self.samples_per_epoch, self.tokens_left_over = divmod(self._passes * tokens - 1, seq_len)
        self._epoch = -1

    def pieces(self, k: int) -> list[Piece]:
        """The stretches of documents that make up the S+1 tokens of sample k >= 0 (k counts through all epochs)."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are counted from 0")
        epoch, nth = divmod(k, self.samples_per_epoch)
        if epoch != self._epoch:
            self._build(epoch)
        start = int(self._samples[nth]) * self.seq_len
        stop = start + self.seq_len + 1
        places, _ = locate(self._begins, np.array([start, stop - 1]))
        first, last = places.tolist()
        documents = self._documents[first : last + 1].tolist()
        begins = self._begins[first : last + 2].tolist()
        return [
            (document, max(start - begin, 0), min(stop, end) - begin)
            for document, (begin, end) in zip(documents, pairwise(begins), strict=True)
            if end > begin
        ]

    def _build(self, epoch: int) -> None:
        self._documents = np.tile(np.arange(len(self.lengths), dtype=np.int32), self._passes)
        self._samples = np.arange(self.samples_per_epoch, dtype=np.uint32)
        if self.shuffle:
            rng = np.random.RandomState((self.seed + epoch) % 2**32)
            rng.shuffle(self._documents)
            rng.shuffle(self._samples)
        self._begins = np.zeros(len(self._documents) + 1, dtype=np.int64)
        np.cumsum(self.lengths[self._documents], out=self._begins[1:])
        self._epoch = epoch


def locate(
    begins: np.ndarray,  # (documents + 1,) int64: where each document begins in reading order, and the end of the last
    tokens: np.ndarray,  # (n,) int64, positions in the concatenated documents
) -> tuple[np.ndarray, np.ndarray]:
    """(place in reading order, offset in that document) of each token: the rows of Megatron's sample index."""
    places = begins.searchsorted(tokens, side="right") - 1
    return places, tokens - begins[places]


def too_few_tokens(tokens: int, seq_len: int) -> str:
    """The sentence for a dataset that cannot fill one sample."""
    return (
        f"the data have {tokens} tokens, fewer than the {seq_len + 1} of one sample; add data or lower training.seq_len"
    )
