#!/usr/bin/env python3
"""How fast batches are read, beside Megatron's GPTDataset where it can be imported: ratios within one run, in turns.

    python benchmarks/data.py [--rounds 5] [--tokens 20000000] [--steps 20]

For the comparison: pip install --no-deps --target FOLDER megatron-core==0.16.1, and FOLDER on PYTHONPATH. Rates are
tokens per second of CPU time of one process on one thread, with the files in the page cache.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from estimation.options import whole
from titan_like.config import load_config
from titan_like.data.dataset import BlendedDataset, TokenDataset
from titan_like.data.indexed import IndexedWriter
from titan_like.data.loader import BatchSource
from titan_like.data.order import SampleOrder
from titan_like.models.documents import Documents, attend_within_documents, dense_mask, document_bounds
from titan_like.trainer import Trainer

SEQ_LEN, BATCH, MEAN_DOCUMENT, EOD = 2048, 8, 1000, 0
# What a batch says of documents: nothing; reset positions and loss masks; the attention mask too, which Megatron builds
# as a dense (S, S) one.
CASES = ("plain", "document boundaries", "document masks")
Turn = Callable[[], float]  # returns tokens per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=whole(1, 10**6), default=5)
    parser.add_argument(
        "--tokens", type=whole(100_000, 10**11), default=20_000_000, help="size of the shard that is read"
    )
    parser.add_argument("--steps", type=whole(1, 10**6), default=20, help="training steps for the loader's share")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_shard(Path(folder) / "shard", args.tokens)
        reading(prefix, args.rounds)
        print(f"index of 1e9 tokens in 1e6 documents: {index_seconds():.2f} s")
        print(f"resume of a blend of two such shards at sample 1e9: {resume_seconds(prefix):.2f} s")
        print(f"loader's share of a debug step: {loader_share(Path(folder), prefix, args.steps):.2%}")
    for mean in (50, 200, 1000):
        print(f"attention in documents of {mean} tokens, dense mask / per document: {attention_ratio(mean):.1f}")


def write_shard(prefix: Path, tokens: int) -> Path:
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        while tokens > 0:
            length = int(rng.exponential(MEAN_DOCUMENT)) + 2
            writer.add_document(np.append(rng.integers(1, 4096, length - 1), EOD))
            tokens -= length
    return prefix


def reading(prefix: Path, rounds: int) -> None:
    """Every case's rate, and its ratio to Megatron's rate of the same round."""
    turns: dict[str, Turn] = {}
    for case in CASES:
        turns[f"ours, {case}"] = our_turn(prefix, case)
        if (peer := megatron_turn(prefix, case)) is not None:
            turns[f"megatron-core, {case}"] = peer
    rates: dict[str, list[float]] = {name: [] for name in turns}
    torch.zeros(
        5_000_000
    )  # freed at once: glibc then reuses memory of batches, as in any process that has trained a step
    for _ in range(rounds):
        for name, turn in turns.items():
            rates[name].append(turn())
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found) / 1e6:.1f} million tokens/s")
    for case in CASES:
        peer_rates = rates.get(f"megatron-core, {case}")
        if peer_rates is None:
            print(f"ours / megatron-core, {case}: n/a (megatron-core cannot be imported)")
        else:
            ratios = [a / b for a, b in zip(rates[f"ours, {case}"], peer_rates, strict=True)]
            print(f"ours / megatron-core, {case}: {statistics.median(ratios):.1f}")


def our_turn(prefix: Path, case: str, batches: int = 100) -> Turn:
    """Whole batches as the training step gets them: labels, positions and what is said of documents included."""
    source = make_source(TokenDataset([prefix], SEQ_LEN, seed=0, documents=case != "plain"), case)

    def read() -> None:
        for _ in range(batches):
            source.next_step()

    return timed(read, batches)


def make_source(dataset: TokenDataset | BlendedDataset, case: str) -> BatchSource:
    return BatchSource(
        dataset, local_batch_size=BATCH, global_batch_size=BATCH, dp_rank=0, dp_size=1,
        reset_position_ids=case != "plain", eod_mask_loss=case != "plain",
        reset_attention_mask=case == "document masks", vocab_size=4096,
    )  # fmt: skip


def megatron_turn(prefix: Path, case: str) -> Turn | None:
    """The same batches through GPTDataset and torch's default collation; None where it cannot be imported."""
    try:
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split
    except ImportError:
        return None

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 4096, EOD, -1, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=0, sequence_length=SEQ_LEN, split="1", tokenizer=Tokenizer(), path_to_cache=f"{prefix}.cache",
        reset_position_ids=case != "plain", eod_mask_loss=case != "plain",
        reset_attention_mask=case == "document masks", create_attention_mask=case == "document masks",
    )  # fmt: skip
    indexed = IndexedDataset(str(prefix))
    documents = np.arange(len(indexed.sequence_lengths), dtype=np.int32)
    dataset = GPTDataset(indexed, str(prefix), documents, 5000, Split.train, config)
    batches, position = 10 if case == "document masks" else 100, iter(range(10**9))

    def read() -> None:
        for _ in range(batches):
            rows = [dataset[next(position) % 5000] for _ in range(BATCH)]
            torch.utils.data.default_collate(rows)

    return timed(read, batches)


def timed(read: Callable[[], Any], batches: int) -> Turn:
    def turn() -> float:
        read()  # what ran before has left its traces in caches and allocator
        started = time.process_time()
        read()
        return batches * BATCH * SEQ_LEN / (time.process_time() - started)

    return turn


def index_seconds() -> float:
    started = time.perf_counter()
    SampleOrder(np.full(1_000_000, 1000, np.int32), SEQ_LEN, seed=0).pieces(0)
    return time.perf_counter() - started


def resume_seconds(prefix: Path) -> float:
    """From files to the first batch, the index of a million documents per shard included."""
    with IndexedWriter(f"{prefix}-large", np.uint16) as writer:
        for _ in range(1_000_000):
            writer.add_document([1, 2, 3, EOD])
    started = time.perf_counter()
    parts = [TokenDataset([f"{prefix}-large"], SEQ_LEN, seed, documents=True) for seed in (0, 1)]
    source = make_source(BlendedDataset(parts, [0.7, 0.3]), "document masks")
    source.load_state_dict({"consumed_samples": 10**9})
    source.next_step()
    return time.perf_counter() - started


def loader_share(folder: Path, prefix: Path, steps: int) -> float:
    """Time that the training process waits for data, of all its time, for the debug model with document masks."""
    trainer = Trainer(
        load_config(
            [
                f"--job.dump_folder={folder}/run", f"--data.train={prefix}", "--data.validation=[]",
                f"--training.steps={steps + 1}", "--training.seq_len=256", f"--training.local_batch_size={BATCH}",
                "--data.reset_attention_mask", "--data.reset_position_ids", "--checkpoint.no-enable",
                "--comm.backend=gloo", "--metrics.no-enable_tensorboard", "--training.mixed_precision_param=float32",
            ]
        )
    )  # fmt: skip
    trainer.fit(until=1)  # warm-up
    waited, next_step = 0.0, trainer.data.batches.next_step

    def measured() -> list[Any]:
        nonlocal waited
        started = time.perf_counter()
        step = next_step()
        waited += time.perf_counter() - started
        return step

    trainer.data.batches.next_step = measured  # type: ignore[method-assign]
    started = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - started
    trainer.close()
    return waited / seconds


def attention_ratio(mean: int, rows: int = 1, heads: int = 4, head_dim: int = 64) -> float:
    """Forward and backward of one attention on the CPU, the better of two."""
    rng = np.random.default_rng(0)
    begins = np.unique(np.append(0, np.cumsum(rng.exponential(mean, SEQ_LEN // mean * 3 + 3).astype(int) + 1)))
    begins = begins[begins < SEQ_LEN]
    starts = torch.from_numpy(np.repeat(begins, np.diff(np.append(begins, SEQ_LEN)))).expand(rows, SEQ_LEN)
    bounds, longest = document_bounds(Documents(starts, rows * len(begins), SEQ_LEN))
    mask = dense_mask(bounds, rows, SEQ_LEN)
    q, k, v = (torch.randn(rows, heads, SEQ_LEN, head_dim, requires_grad=True) for _ in range(3))

    def seconds(attend: Callable[[], torch.Tensor]) -> float:
        found = []
        for _ in range(2):
            started = time.perf_counter()
            attend().sum().backward()
            found.append(time.perf_counter() - started)
        return min(found)

    dense = seconds(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return dense / seconds(lambda: attend_within_documents(q, k, v, bounds, longest))


if __name__ == "__main__":
    main()
