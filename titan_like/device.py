"""What differs between devices and nothing else: everything above this file runs the same on CPU and GPU."""

import os

import psutil
import torch

# Dense bf16 peak of one device in FLOP/s, by a part of its name; from the vendors' data sheets. First match wins.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,  # one of its two dies
    "L40S": 362e12,
}


def find_device(backend: str = "auto") -> torch.device:
    """This process's device: the GPU of its local rank, or the CPU (also where `backend` is gloo)."""
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def collective_backend(device: torch.device) -> str:
    """NCCL for GPU tensors, gloo for CPU tensors (checkpoints use both on a GPU)."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, None where it is not known: an MFU is never a guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def memory_gib(device: torch.device, *, reset: bool = True) -> dict[str, float]:
    """GiB: peaks of active and reserved since the last call with `reset` on a GPU, the resident set now on CPU."""
    if device.type != "cuda":
        return {"rss": psutil.Process().memory_info().rss / 2**30}
    stats = torch.cuda.memory_stats(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return {"active": stats["active_bytes.all.peak"] / 2**30, "reserved": stats["reserved_bytes.all.peak"] / 2**30}
