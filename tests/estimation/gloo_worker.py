"""One of several gloo processes: real training steps, measured, beside the trace of the same rank.

Started by torchrun with lines of tests/distributed/compositions.py; appends
{line, rank, measured, traced, unseen, transport} to the file named first.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from estimation.trace import STEPS, wrap
from tests.distributed.compositions import composition
from tests.estimation.cpu_memory import CpuMemory
from tests.estimation.test_trace import report, tracked
from titan_like.fake import train


def main(path: str, *lines: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    memories = []
    for line in lines:
        model = wrap(composition(line))
        gc.collect()
        with CpuMemory() as memory:
            train(model, composition(line), STEPS)
        memories.append(memory)
        del model
        dist.barrier()
    dist.destroy_process_group()
    for line, memory in zip(lines, memories, strict=True):
        tracker, buffers = tracked(composition(line), world_size, rank, fake=True)
        memory.read(tracker.operations)
        found = {
            "line": line,
            "rank": rank,
            "measured": memory.peak + buffers,
            "traced": report(tracker, world_size, rank, buffers, gpu=False).peak_bytes,
            "unseen": sum(memory.changes) - sum(sign * record.size for sign, record in tracker.events),
            "transport": memory.transport,
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
