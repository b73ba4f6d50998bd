"""One process of one contender: python -m benchmarks.peers TASK, with TASK as JSON. benchmarks/train.py starts it."""

import importlib
import json
import os
import sys
from typing import TextIO

# contender: module with run(task, gate), and what the module is told of the variant
CONTENDERS = {
    "titan_like": ("ours", ""),
    "titan_like, recompute": ("ours", "recompute"),
    "titan_like, dense mask": ("ours", "dense"),
    "bare": ("bare", "plain"),
    "bare, chunked loss": ("bare", "chunked"),
    "transformers": ("transformers_trainer", ""),
    "litgpt": ("litgpt_pretrain", ""),
    "torchtitan": ("torchtitan_trainer", "default"),
    "torchtitan, no recompute": ("torchtitan_trainer", "none"),
}


def main() -> None:
    channel = messages_only()
    if (cores := os.environ.get("BENCHMARK_CORE")) is not None:
        os.sched_setaffinity(0, {int(cores)})
    from benchmarks.peers.gate import Gate, NotRunnable, Task

    task = Task(**json.loads(sys.argv[1]))
    module, variant = CONTENDERS[task.contender]
    try:
        importlib.import_module(f"benchmarks.peers.{module}").run(task, Gate(task, channel), variant)
    except (ImportError, NotRunnable) as error:
        print(json.dumps({"reason": str(error)}), file=channel, flush=True)
    channel.flush()
    os._exit(0)  # what a trainer does at its very end is not measured


def messages_only() -> TextIO:
    """Standard output as it was; whatever a trainer prints from now on goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


if __name__ == "__main__":
    main()
