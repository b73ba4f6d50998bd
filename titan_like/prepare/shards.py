"""Tokenising texts into shards with manifests, and merging shards."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import numpy as np
from pydantic import JsonValue

from titan_like.config.errors import ConfigError
from titan_like.data.indexed import IndexedDataset, IndexedWriter, merge_indexed, optimal_dtype
from titan_like.data.manifest import Manifest, file_sha256, manifest_path
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.config import PrepareConfig

BATCH_CHARACTERS = 1 << 20  # a batch of the tokenizer; three of them bound the memory held as Python lists
CHARACTERS_PER_DOCUMENT = 100  # what an empty document counts: Python objects are not free
LONGEST_CHARACTERS = 1 << 20  # longer documents are tokenised in parts cut at line ends, which bounds it too


Batch = list[tuple[str, bool]]  # parts of documents, and whether each is the last of its document


class Vocabulary:
    """A tokenizer with the special ids and the dtype that a preparation uses.

    Raises:
        ConfigError: no EOD, BOS or a dtype that cannot hold the ids.
    """

    def __init__(self, path: str | Path, config: PrepareConfig) -> None:
        self.tokenizer = Tokenizer(path)
        settings, output = config.tokenizer, config.output
        self.eod_id = self._special("eod", settings.eod, self.tokenizer.eos_id)
        self.bos_id = self._special("bos", settings.bos, self.tokenizer.bos_id)
        self.pad_id = self._special("pad", settings.pad, self.tokenizer.pad_id)
        self.append_eod, self.add_bos = output.append_eod, output.bos
        for needed, name, found in ((output.append_eod, "eod", self.eod_id), (output.bos, "bos", self.bos_id)):
            if needed and found < 0:
                raise ConfigError(
                    f"{path} does not say which id is {name.upper()}; set tokenizer.{name} to an id or a token"
                )
        self.dtype = optimal_dtype(self.tokenizer.vocab_size) if output.dtype == "auto" else np.dtype(output.dtype)

    def encode(self, texts: Iterable[str], threads: int) -> Iterator[list[np.ndarray]]:
        """Ids of each document in parts of int32, with BOS and EOD as asked for."""
        begin, end = [self.bos_id] * self.add_bos, [self.eod_id] * self.append_eod
        arrays = [np.array(begin, np.int32)]
        for batch, encoded in self._encoded(_batches(part for text in texts for part in _parts(text)), threads):
            for (_, is_last), ids in zip(batch, encoded, strict=True):
                arrays.append(np.array(ids, np.int32))
                if is_last:
                    yield [*arrays, np.array(end, np.int32)]
                    arrays = [np.array(begin, np.int32)]

    def _encoded(self, batches: Iterable[Batch], threads: int) -> Iterator[tuple[Batch, list[list[int]]]]:
        """Each batch with its ids. The next two are tokenised meanwhile, so that no core waits for reading, for writing
        or for a batch's last long document; the libraries work without Python's lock."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            ahead: deque[tuple[Batch, Future[list[list[int]]]]] = deque()
            for batch in batches:
                ahead.append((batch, pool.submit(self.tokenizer.encode_batch, [part for part, _ in batch], threads)))
                if len(ahead) > 2:
                    done, ids = ahead.popleft()
                    yield done, ids.result()
            for done, ids in ahead:
                yield done, ids.result()

    def _special(self, name: str, asked: int | str, own: int) -> int:
        if asked == "auto":
            return own
        try:
            return self.tokenizer.id_of(asked)
        except ConfigError as error:
            raise ConfigError(f"tokenizer.{name}: {error}") from error


def write_shard(
    prefix: Path,
    texts: Iterable[tuple[str, str]],
    vocabulary: Vocabulary,
    source: str,
    settings: dict[str, JsonValue],
    place: tuple[int, int] = (0, 1),
    threads: int = -1,
) -> Manifest:
    """Write `{prefix}.bin/.idx/.manifest.json` of (name, text) pairs, the manifest last; `place` is (shard, shards).

    Raises:
        ConfigError: an id does not fit the dtype; the document is named.
    """
    names: deque[str] = deque()

    def remember(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
        for name, text in pairs:
            names.append(name)
            yield text

    with IndexedWriter(prefix, vocabulary.dtype) as writer:
        for parts in vocabulary.encode(remember(texts), threads):
            try:
                if any(map(len, parts)):  # a text can have no ids of its own without EOD
                    writer.add_parts(parts)
            except ConfigError as error:
                raise ConfigError(f"{error} ({names[0]})") from error
            names.popleft()
    tokenizer = vocabulary.tokenizer
    facts: dict[str, JsonValue] = {
        "tokenizer": Path(tokenizer.path).name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": vocabulary.eod_id,
        "bos_id": vocabulary.bos_id,
        "pad_id": vocabulary.pad_id,
        "append_eod": vocabulary.append_eod,
        "add_bos": vocabulary.add_bos,
        "source": source,
        "shard": place[0],
        "shards": place[1],
        "settings": settings,
        "versions": {"python": python_version(), **{name: version(name) for name in ("numpy", tokenizer.package)}},
    }
    return describe(prefix, facts)


def describe(prefix: Path, facts: dict[str, JsonValue]) -> Manifest:
    """Save the manifest of the shard that is there: what is known of it, and what its files say."""
    data = IndexedDataset(prefix)
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    counts = count_tokens(data, int(str(facts["vocab_size"])))
    manifest = Manifest.model_validate(
        facts
        | {
            "documents": len(data.document_indices) - 1,
            "tokens": data.num_tokens,
            "dtype": str(data.dtype),
            "unigram_entropy_nats": entropy_nats(counts),
            "bin_sha256": file_sha256(bin_path),
            "bin_bytes": bin_path.stat().st_size,
            "idx_sha256": file_sha256(idx_path),
            "idx_bytes": idx_path.stat().st_size,
        }
    )
    manifest.save(prefix)
    return manifest


def merge(prefixes: Sequence[str], output: str) -> Manifest | None:
    """Put shards one after the other into one; returns its manifest, None if one of them had none.

    Raises:
        ConfigError: shards of different tokenizers, special ids or dtypes, or an output that exists.
    """
    manifests = [Manifest.load(prefix) for prefix in prefixes]
    for path in (Path(f"{output}.bin"), Path(f"{output}.idx"), manifest_path(output)):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it or choose another output")
    known = [manifest for manifest in manifests if manifest]
    keys = ("tokenizer_sha256", "vocab_size", "eod_id", "bos_id", "pad_id", "append_eod", "add_bos")
    for key in keys:
        if len({getattr(manifest, key) for manifest in known}) > 1:
            values = ", ".join(f"{p}: {getattr(m, key)}" for p, m in zip(prefixes, manifests, strict=True) if m)
            raise ConfigError(f"the shards differ in {key} ({values}); merge shards of one preparation")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    merge_indexed([IndexedDataset(prefix) for prefix in prefixes], output)
    if len(known) < len(prefixes):
        return None
    facts = known[0].model_dump(mode="json", include={*keys, "settings", "versions"})
    tokenizer = os.path.relpath(known[0].tokenizer_path(prefixes[0]), Path(output).parent)
    sources = " + ".join(dict.fromkeys(manifest.source for manifest in known))
    return describe(Path(output), facts | {"tokenizer": tokenizer, "source": sources, "shard": 0, "shards": 1})


def count_tokens(data: IndexedDataset, vocab_size: int) -> np.ndarray:
    """How often each id occurs, (vocab_size,) int64.

    Raises:
        ConfigError: an id outside the vocabulary; the document is named.
    """
    counts = np.zeros(vocab_size, np.int64)
    for first, tokens in data.blocks():
        low, high = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        if low < 0 or high >= vocab_size:
            at = first + int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
            raise ConfigError(
                f"document {data.document_of(at)} of {data.prefix} has the token id {int(tokens[at - first])}, but the "
                f"vocabulary has the ids 0 to {vocab_size - 1}; prepare the data again"
            )
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the distribution with these counts, in nats."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part[0]) + CHARACTERS_PER_DOCUMENT
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in parts, and whether each is the last; cut at line ends, else at spaces, else anywhere."""
    start = 0
    while len(text) - start > LONGEST_CHARACTERS:
        stop = start + LONGEST_CHARACTERS
        cut = max(text.rfind("\n", start + 1, stop), start)
        cut = cut if cut > start else max(text.rfind(" ", start + 1, stop), start)
        stop = cut if cut > start else stop
        yield text[start:stop], False
        start = stop
    yield text[start:], True
