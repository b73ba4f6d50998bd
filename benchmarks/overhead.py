#!/usr/bin/env python3
"""The cost of the trainer over a bare loop: the same model, data and optimizer, in one process, in turns.

    python benchmarks/overhead.py [--rounds 12] [--steps 10]

Prints the median over the rounds of (time of the trainer's loop / time of the hand-written loop) and its quartiles.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from estimation.options import whole
from titan_like.config import load_config
from titan_like.data.indexed import IndexedWriter
from titan_like.models.decoder import Decoder
from titan_like.trainer import Trainer

SEQ_LEN, BATCH = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=whole(2, 10**6), default=12)
    parser.add_argument("--steps", type=whole(1, 10**6), default=10, help="steps per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), steps=args.steps * (args.rounds + 1) + 1)
        turns = {"trainer": trainer_turn(trainer, args.steps), "bare": bare_turn(trainer, args.steps)}
        for turn in turns.values():
            turn()  # warm-up
        ratios = []
        for round_number in range(args.rounds):
            order = ("trainer", "bare") if round_number % 2 else ("bare", "trainer")
            seconds = {name: turns[name]() for name in order}
            ratios.append(seconds["trainer"] / seconds["bare"])
        trainer.close()
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(f"trainer / bare loop: median {median:.4f}, quartiles {low:.4f} to {high:.4f}, {args.rounds} rounds")


def make_trainer(folder: Path, steps: int) -> Trainer:
    with IndexedWriter(folder / "train", np.uint16) as writer:
        rng = np.random.default_rng(0)
        for _ in range(200):
            writer.add_document(rng.integers(0, 4096, 2000))
    return Trainer(
        load_config(
            [
                f"--job.dump_folder={folder}/run", f"--data.train={folder}/train", "--data.validation=[]",
                f"--training.steps={steps}", f"--training.seq_len={SEQ_LEN}", f"--training.local_batch_size={BATCH}",
                "--training.mixed_precision_param=float32", "--checkpoint.no-enable", "--comm.backend=gloo",
            ]
        )
    )  # fmt: skip


def trainer_turn(trainer: Trainer, steps: int) -> Callable[[], float]:
    def turn() -> float:
        started = time.perf_counter()
        trainer.fit(until=trainer.counters.step + steps)
        return time.perf_counter() - started

    return turn


def bare_turn(trainer: Trainer, steps: int) -> Callable[[], float]:
    """What one would write by hand: the same model without a trainer, mean loss, torch's clipping."""
    model = Decoder(trainer.model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    positions = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    samples = iter(range(10**9))

    def turn() -> float:
        started = time.perf_counter()
        for _ in range(steps):
            rows = torch.from_numpy(np.stack([trainer.data.dataset[next(samples)] for _ in range(BATCH)]))
            logits = model(rows[:, :-1], positions)
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        return time.perf_counter() - started

    return turn


if __name__ == "__main__":
    main()
