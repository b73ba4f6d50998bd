#!/usr/bin/env python3
"""What checkpoints cost, for a state of 500 MB on one rank, each beside what it cannot be cheaper than, in one run:

python benchmarks/checkpoint.py [--megabytes 500] [--folder DIR] [--rounds 5]

- a save in the background holds the step up for one copy in memory: at most 1.2 times a plain copy
- a save costs dcp.save and reading the files once for their hashes: at most 1.3 times both
- verifying before a load reads and hashes: 1 GB/s for each core, or what the disk gives

Each round measures all of them one after the other. Ratios are those of the fastest rounds: other load only adds.
"""

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from estimation.options import whole
from titan_like.checkpoint import commit, manager
from titan_like.checkpoint.saver import Saver
from titan_like.config.schema import Checkpoint

TENSORS = 60  # of a model of some 20 blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=whole(1, 10**7), default=500, help="size of the state (default 500)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--rounds", type=whole(1, 10**6), default=5, help="default 5")
    args = parser.parse_args()
    try:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=args.folder))
    except OSError as error:
        parser.error(f"--folder {args.folder} cannot be written ({error.strerror}); name a folder that exists")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report(measure(folder, state(args.megabytes), args.rounds), args.megabytes / 1000)
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


def state(megabytes: int) -> dict[str, Tensor]:
    rows = megabytes * 10**6 // 4 // TENSORS // 1000
    return {f"model.layers.{number}.weight": torch.randn(rows, 1000) for number in range(TENSORS)}


def measure(folder: Path, tensors: dict[str, Tensor], rounds: int) -> dict[str, list[float]]:
    """Seconds by what was done, one per round."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        seconds[name].append(time.perf_counter() - started)

    saver = Saver(folder / "async", Checkpoint(async_mode="thread", keep_latest_k=1))
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for number in range(1, rounds + 1):
        timed("plain copy into new memory", lambda: [tensor.clone() for tensor in tensors.values()])
        timed("plain copy", lambda: [buffers[name].copy_(tensor) for name, tensor in tensors.items()])
        # The first one allocates the buffers that the later ones reuse.
        hold_up = "hold-up, first" if number == 1 else "hold-up"
        timed(hold_up, lambda step=number: saver.save(step, tensors, {}, ""))  # type: ignore[misc]
        saver.wait()

        plain, whole = folder / f"plain-{number}", folder / f"whole-{number}"
        timed("dcp.save", lambda path=plain: dcp.save(tensors, checkpoint_id=path))  # type: ignore[misc]
        timed("hashing", lambda path=plain: hash_all(path))  # type: ignore[misc]
        timed("save", lambda path=whole: manager.save(path, 1, tensors, {}, ""))  # type: ignore[misc]
        timed("verify", lambda path=whole: commit.find_damage(path / "step-1", hashes=True))  # type: ignore[misc]
        timed("sha256 in memory", lambda: [hashlib.sha256(t.numpy().data).digest() for t in tensors.values()])
        for path in (plain, whole):
            shutil.rmtree(path)
    return seconds


def hash_all(folder: Path) -> None:
    for path in folder.iterdir():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)


def report(seconds: dict[str, list[float]], gigabytes: float) -> None:
    best = {name: min(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:<28} {best[name]:7.3f} s  {gigabytes / best[name]:6.2f} GB/s   (median {middle:.3f} s)")
    first = best["hold-up, first"] / best["plain copy into new memory"]
    print(f"\na save in the background holds the first step up for {first:.2f} times a plain copy into new memory,")
    if "hold-up" in best:
        print(f"the later ones for {best['hold-up'] / best['plain copy']:.2f} times a plain copy (goal: 1.2)")
    ratio = best["save"] / (best["dcp.save"] + best["hashing"])
    print(f"a save costs {ratio:.2f} times dcp.save and hashing (goal: 1.3)")
    alone = gigabytes / best["sha256 in memory"]
    print(f"verifying: {gigabytes / best['verify']:.2f} GB/s on one core; sha256 alone: {alone:.2f} GB/s")


if __name__ == "__main__":
    main()
