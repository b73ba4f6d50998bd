"""`titan-estimate calibrate`: an entry of devices.py measured on the machine at hand, as a file for `--device`.

Memory outside torch's allocator is what the whole device has less, so nothing else may run on it meanwhile.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from estimation.devices import GIB, Device
from titan_like.config.errors import ConfigError

SIZE = 8192  # of matrices, rows of attention, and 1/2^15 of the bytes that are copied or sent
FURTHER = 3  # communicators after the first
REPEATS = 10


def calibrate(output: Path, known: Device) -> None:
    """Measure this machine's GPUs and write a device for --device: memory outside of torch's allocator, and rates of
    matrix products, attention, memory and, with two GPUs or more, collectives. Peaks, the network, and what is not
    measured stay those of the --device that is named."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "calibrate measures GPUs, and torch sees none here; run it on a machine that has some, or take a --device "
            "of the table"
        )
    count = torch.cuda.device_count()
    before = [_used(index) for index in range(count)]  # the contexts of this process included
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(count, f"file://{folder}/meet", before, known, results), nprocs=count)
    found = results.get()
    device = replace(known, name=output.stem, source=f"calibrate, torch {torch.__version__}", **found)
    write_device(output, device)
    lines = [f"{name:<16} {value} (was {getattr(known, name)})" for name, value in found.items()]
    missing = [] if count > 1 else ["not measured: collectives and their memory, since there is one GPU"]
    print(*lines, *missing, f"written for --device: {output}", sep="\n")


def write_device(path: Path, device: Device) -> None:
    """As TOML, which `device_named` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps({key: value for key, value in asdict(device).items() if value is not None}))


def _measure(rank: int, count: int, meet: str, before: list[int], known: Device, results: Any) -> None:
    torch.cuda.set_device(rank)
    found: dict[str, Any] = rates(torch.device("cuda", rank), known)
    outside = _outside(rank) - before[rank]
    if count > 1:
        dist.init_process_group("nccl", meet, rank=rank, world_size=count)
        found |= collectives(torch.device("cuda", rank), known)
        first = _outside(rank) - before[rank]
        for _ in range(FURTHER):
            dist.all_reduce(torch.ones(2**20, device="cuda"), group=dist.new_group())
        found["communicator_gib"] = round((_outside(rank) - before[rank] - first) / FURTHER / GIB, 3)
        outside = first
        dist.destroy_process_group()
    found["outside_gib"] = round(outside / GIB, 3)
    if rank == 0:
        results.put(found)


def _used(index: int) -> int:
    """Bytes of the device that all processes together have."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free


def _outside(index: int) -> int:
    """Of these, what is not in this process's allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return _used(index) - torch.cuda.memory_reserved(index)


def rates(device: torch.device, known: Device, size: int = SIZE) -> dict[str, Any]:
    """Measured rates as shares of the peaks of `known`: fields of Device."""
    peak = known.tflops * 1e12
    found: dict[str, Any] = {
        "efficiency": round(matrix_rate(device, torch.bfloat16, size) / peak, 3),
        "memory_share": round(copy_rate(device, size) / (known.memory_tb_s * 1e12), 3),
        "flash": [round(rate / peak, 3) for rate in attention_rates(device, size)],
    }
    if known.float8 and (rate := float8_rate(device, size)):
        found["float8"] = round(rate / (2 * peak), 3)
    return found


def copy_rate(device: torch.device, size: int = SIZE) -> float:
    """Bytes/s that a copy reads and writes."""
    x = torch.empty(size * 2**14, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / best_seconds(lambda: y.copy_(x), device)


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = SIZE) -> float:
    """FLOP/s of a product of square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: torch.mm(a, b), device)


def float8_rate(device: torch.device, size: int = SIZE) -> float:
    """FLOP/s of a product of float8 matrices; 0 where the device has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    work = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * size**3 / best_seconds(work, device)


def attention_rates(device: torch.device, size: int = SIZE) -> tuple[float, float]:
    """FLOP/s of causal attention over `size` tokens, forward and backward; half of the products count."""
    heads, head_dim = 16, 128
    q, k, v = (
        torch.randn(1, heads, size, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    flops = 4 * heads * head_dim * size**2 / 2
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    with torch.no_grad():
        forward = best_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    backward = best_seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return flops / forward, 2.5 * flops / backward


def collectives(device: torch.device, known: Device, size: int = SIZE) -> dict[str, Any]:
    """Bandwidth of an all-reduce, as nccl-tests count it (busbw), over that of a link."""
    message, count = torch.ones(size * 2**14, dtype=torch.bfloat16, device=device), dist.get_world_size()
    seconds = best_seconds(lambda: dist.all_reduce(message), device)
    sent = 2 * (count - 1) / count * message.nbytes
    return {"link_share": round(sent / seconds / (known.link_gb_s * 1e9), 3)}


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some runs of `work`, after one to warm up."""
    best = float("inf")
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
