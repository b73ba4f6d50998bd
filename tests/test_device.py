import pytest
import torch

from titan_like.device import collective_backend, find_device, memory_gib, peak_flops

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_peaks_are_known_or_absent(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:  # R154
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(GPU) == peak


def test_the_cpu() -> None:
    assert peak_flops(CPU) is None
    assert find_device("gloo") == CPU
    assert collective_backend(CPU) == "gloo" and "nccl" in collective_backend(GPU)
    memory = memory_gib(CPU)
    assert list(memory) == ["rss"] and 0.01 < memory["rss"] < 1000  # a process with torch takes some hundred MiB
