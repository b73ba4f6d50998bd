"""Training samples out of prepared shards, one set of documents or a blend of several, and the check of them."""

import glob
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from titan_like.config.errors import ConfigError
from titan_like.data.blend import BlendOrder
from titan_like.data.indexed import IndexedDataset
from titan_like.data.manifest import Manifest, expand_prefix, file_sha256
from titan_like.data.order import SampleOrder, too_few_tokens


class TokenDataset:
    """Samples of S+1 tokens; several shards are read as one set of documents. `dataset[k]` is sample k of the run.

    Args:
        entries: prefixes, or folders and `prefix*` patterns that stand for all shards in them, by name.
        documents: a sample also says where the document of each of its tokens starts.
        repeat: data shorter than one sample are repeated to fill it, instead of being refused.
    Attributes:
        prefixes, manifests: one per shard; the manifest is None for shards of other tools.
        seq_len: S.
    Raises:
        ConfigError: files missing or damaged, shards of different tokenizers, or fewer than S+1 tokens.
    """

    def __init__(
        self,
        entries: Sequence[str | Path],
        seq_len: int,
        seed: int,
        shuffle: bool = True,
        documents: bool = False,
        repeat: bool = False,
    ) -> None:
        self.name = ", ".join(map(str, entries))
        self._documents = documents
        self.prefixes, self._shards, self.manifests = _open_shards(entries)
        self.seq_len = seq_len
        lengths = np.concatenate([shard.lengths for shard in self._shards])
        self._order = SampleOrder(lengths, seq_len, seed, shuffle, repeat)
        self._first_document = [0, *accumulate(shard.num_sequences for shard in self._shards)]

    def __len__(self) -> int:
        """Samples of one epoch; the same in every epoch."""
        return self._order.samples_per_epoch

    def __getitem__(self, k: int) -> np.ndarray:
        """Sample k >= 0 of the run, in any epoch: (S+1,) int64 tokens; with `documents` (2, S+1): tokens, and the index
        in the sample of the first token of each token's document."""
        sample = np.empty((1 + self._documents, self.seq_len + 1), dtype=np.int64)
        filled = 0
        for document, start, stop in self._order.pieces(k):
            shard = bisect_right(self._first_document, document) - 1
            place = slice(filled, filled + stop - start)
            sample[0, place] = self._shards[shard].read(document - self._first_document[shard], start, stop)
            if self._documents:
                sample[1, place] = filled
            filled += stop - start
        return sample if self._documents else sample[0]

    def place(self, k: int, at: int) -> str:
        """The document and the shard of token `at` of sample k."""
        pieces = self._order.pieces(k)
        ends = list(accumulate(stop - start for _, start, stop in pieces))
        sequence = pieces[bisect_right(ends, at)][0]
        shard = bisect_right(self._first_document, sequence) - 1
        document = self._shards[shard].document_of_sequence(sequence - self._first_document[shard])
        return f"document {document} of {self.prefixes[shard]}"

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self._shards)

    @property
    def summary(self) -> str:
        """What one epoch holds, for people."""
        return (
            f"{self._first_document[-1]:,} documents, {self.num_tokens:,} tokens, {len(self):,} samples per epoch "
            f"({self._order.tokens_left_over:,} tokens left over)"
        )

    def epochs(self, consumed: int) -> dict[str, float]:
        """How often each set has been read after `consumed` samples of the run, by its name."""
        return {self.name: consumed / len(self)}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal identity of the data: hashes from the manifests, else the lengths of the documents; no paths."""
        parts = [
            f"{manifest.bin_sha256} {manifest.idx_sha256}"
            if manifest
            else f"{shard.dtype} {hashlib.sha256(shard.lengths.tobytes()).hexdigest()}"
            for shard, manifest in zip(self._shards, self.manifests, strict=True)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class BlendedDataset:
    """Samples of several sets by weight, in Megatron's order (see blend.py). Each set goes through epochs of its own.

    Args:
        parts: sets of the same seq_len.
        weights: > 0, one per part: its share of the samples, and so of the tokens.
    Raises:
        ConfigError: parts of different tokenizers.
    """

    def __init__(self, parts: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        self.parts = parts
        self.prefixes = [prefix for part in parts for prefix in part.prefixes]
        self.manifests = [manifest for part in parts for manifest in part.manifests]
        self.seq_len = parts[0].seq_len
        self._order = BlendOrder(weights)
        if problem := _several_tokenizers(self.prefixes, self.manifests):
            raise ConfigError(problem)

    def __len__(self) -> int:
        """Samples of the run before the first one that any set gives for the second time."""
        return self._order.first_beyond([len(part) for part in self.parts])

    def __getitem__(self, k: int) -> np.ndarray:
        """Sample k >= 0 of the run; as TokenDataset."""
        part, number = self._order.locate(k)
        return self.parts[part][number]

    def place(self, k: int, at: int) -> str:
        """As TokenDataset."""
        part, number = self._order.locate(k)
        return self.parts[part].place(number, at)

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def summary(self) -> str:
        """What the parts hold, for people."""
        shares = zip(self.parts, self._order.weights, strict=True)
        return "; ".join(f"{share:.2%} {part.name}: {part.summary}" for part, share in shares)

    def epochs(self, consumed: int) -> dict[str, float]:
        """As TokenDataset; of equal names the last counts."""
        counts = self._order.counts(consumed)
        return {part.name: int(count) / len(part) for part, count in zip(self.parts, counts, strict=True)}

    @property
    def fingerprint(self) -> str:
        """As TokenDataset; the weights are part of it."""
        parts = [
            f"{part.fingerprint} {share!r}"
            for part, share in zip(self.parts, self._order.weights.tolist(), strict=True)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_training_data(
    entries: Sequence[str], weights: Sequence[float] | None, seq_len: int, seed: int, *, documents: bool, repeat: bool
) -> TokenDataset | BlendedDataset:
    """All entries as one set of documents, or with weights (one per entry) a blend of them. See TokenDataset."""
    if weights is None:
        return TokenDataset(entries, seq_len, seed, documents=documents, repeat=repeat)
    parts = [TokenDataset([entry], seq_len, seed, documents=documents, repeat=repeat) for entry in entries]
    return BlendedDataset(parts, weights)


def check_data(
    entries: Sequence[str | Path],
    seq_len: int,
    vocab_size: int,
    tokenizer_path: str | Path | None,
    *,
    validation: Sequence[str | Path] = (),
    blended: bool = False,
    repeat: bool = False,
) -> list[str]:
    """What stands against training on these shards, one sentence each; reads indices and manifests, no tokens.

    Shards without a manifest are trusted to be of the right tokenizer.

    Args:
        validation: what is validated on: read in order and once.
        blended: each training entry is a set of its own.
        repeat: training data may be shorter than one sample.
    """
    try:
        prefixes, shards, manifests = _open_shards([*entries, *validation])
    except ConfigError as error:
        return error.problems
    problems = []
    tokens = {
        str(entry): sum(shards[prefixes.index(p)].num_tokens for p in expand(entry))
        for entry in [*entries, *validation]
    }
    sets = [([entry], repeat) for entry in entries] if blended else [([*entries], repeat)]
    for members, may_be_short in [*sets, *([([*validation], False)] if validation else [])]:
        total = sum(tokens[str(entry)] for entry in members)
        if total < (1 if may_be_short else seq_len + 1):
            problems.append(f"{', '.join(map(str, members))}: {too_few_tokens(total, seq_len)}")
    try:
        tokenizer_sha256 = file_sha256(tokenizer_path) if tokenizer_path else None
    except OSError as error:
        problems.append(f"cannot read the tokenizer {tokenizer_path}: {error.strerror}; correct model.tokenizer_path")
        tokenizer_sha256 = None
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest is None:
            continue
        if tokenizer_sha256 not in (None, manifest.tokenizer_sha256):
            problems.append(
                f"{prefix} was made with another tokenizer ({manifest.tokenizer_path(prefix)}) than {tokenizer_path}; "
                "use that tokenizer or prepare the data again"
            )
        if manifest.vocab_size > vocab_size:
            problems.append(
                f"the tokenizer of {prefix} has {manifest.vocab_size} ids, the model's vocab_size is {vocab_size}; "
                "raise the model's vocabulary or prepare the data with a smaller tokenizer"
            )
    return problems


def _open_shards(entries: Sequence[str | Path]) -> tuple[list[str], list[IndexedDataset], list[Manifest | None]]:
    """Open all, or raise one ConfigError with a sentence per problem."""
    prefixes: list[str] = []
    shards: list[IndexedDataset] = []
    manifests: list[Manifest | None] = []
    problems: list[str] = []
    for entry in entries:
        try:
            prefixes += (found := expand(entry))
        except ConfigError as error:
            problems += error.problems
            continue
        for prefix in found:
            try:
                shards.append(shard := IndexedDataset(prefix))
                manifests.append(manifest := Manifest.load(prefix))
                if manifest:
                    problems += manifest.problems(prefix) or manifest.differences(shard)
            except ConfigError as error:
                problems += error.problems
    if not entries:
        problems.append("no data: give at least one prefix of .idx/.bin files")
    if not problems and (problem := _several_tokenizers(prefixes, manifests)):
        problems.append(problem)
    if problems:
        raise ConfigError(*problems)
    return prefixes, shards, manifests


def expand(entry: str | Path) -> list[str]:
    """The prefixes that an entry stands for: itself, its series `{entry}_00000` ..., or all shards of a folder or of a
    `prefix*` pattern, by name.

    Raises:
        ConfigError: a folder or a pattern without shards, a series with a gap.
    """
    text = str(entry)
    is_folder = not text.endswith("*") and not Path(f"{text}.idx").exists() and Path(text).is_dir()
    if not is_folder and not text.endswith("*"):
        return expand_prefix(text)
    pattern = f"{glob.escape(text.rstrip('*'))}{'/' if is_folder else ''}*.idx"
    found = sorted(path.removesuffix(".idx") for path in glob.glob(pattern))
    if not found:
        where = f"the folder {text} has no" if is_folder else f"nothing matches {text} among the"
        raise ConfigError(f"{where} .idx files; name a prefix, a folder or a pattern of .idx/.bin files")
    return found


def _several_tokenizers(prefixes: Sequence[str], manifests: Sequence[Manifest | None]) -> str | None:
    made_with = {m.tokenizer_sha256: prefix for prefix, m in zip(prefixes, manifests, strict=True) if m}
    if len(made_with) <= 1:
        return None
    return f"{' and '.join(made_with.values())} were made with different tokenizers; prepare them with one"
