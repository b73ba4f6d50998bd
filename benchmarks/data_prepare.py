"""How much of a tokenizer library's own speed is left in `titan-prepare`'s tokenising, as a ratio in one run.

    python -m benchmarks.data_prepare [TOKENIZER] [--megabytes 30]

Bare: the batch call on all cores on texts in memory, results thrown away. Ours: the same texts from a file of JSON
lines to a finished shard with manifest and hashes. Both alternate; the best of three counts. Goal: ratio >= 0.9.
"""

import argparse
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from estimation.options import whole
from titan_like.config.errors import ConfigError
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.config import load_prepare_config
from titan_like.prepare.shards import Vocabulary, write_shard
from titan_like.prepare.texts import iter_texts, text_file
from titan_like.prepare.vocabulary import train_tokenizer

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", nargs="?", help="default: a SentencePiece model trained on the text")
    parser.add_argument("--megabytes", type=whole(1, 10**4), default=30, help="text from Python's library (default 30)")
    options = parser.parse_args()
    if options.tokenizer:
        try:
            Tokenizer(options.tokenizer)
        except ConfigError as error:
            parser.error(str(error))
    texts = standard_library(options.megabytes * 1_000_000)
    size = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.tokenizer or train(folder / "tokenizer.model", texts)
        bare, ours = measure(folder, path, texts)
    print(f"{Path(path).name}, {size:.1f} MB on {os.cpu_count()} cores")
    print(f"bare {size / bare:.2f} MB/s, titan-prepare {size / ours:.2f} MB/s")
    print(f"ratio {bare / ours:.3f} (goal: at least 0.9)")


def standard_library(size: int) -> list[str]:
    """Texts of together about `size` bytes."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if size <= 0:
            break
        texts.append(path.read_text(errors="replace"))
        size -= len(texts[-1])
    return [text for text in texts if text]


def train(path: Path, texts: list[str]) -> str:
    path.write_bytes(train_tokenizer(texts[:200], 4096))
    return str(path)


def measure(folder: Path, path: str, texts: list[str]) -> tuple[float, float]:
    """Seconds of the bare library and of ours."""
    lines = (json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts))
    text_file(folder, 0).write_text("".join(lines))
    config = load_prepare_config(["--tokenizer.eod", "0"])
    vocabulary = Vocabulary(path, config)
    tokenizer = Tokenizer(path)

    def ours() -> None:
        pairs = iter_texts(folder, [len(texts)], 0, len(texts))
        write_shard(folder / "shard", pairs, vocabulary, "", {})

    bare_seconds, our_seconds = [], []
    for _ in range(ROUNDS):
        bare_seconds.append(seconds(lambda: tokenizer.encode_batch(texts)))
        our_seconds.append(seconds(ours))
    return min(bare_seconds), min(our_seconds)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
