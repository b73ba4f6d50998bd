"""What is known of accelerators: memory, peaks and bandwidths, each from a data sheet or a published measurement.

`efficiency` is the best share of the bf16 peak that a large matrix product was measured to reach (MAMF,
github.com/stas00/ml-engineering, compute/accelerator/benchmarks). Bandwidths are one way, per device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from titan_like.config.errors import ConfigError

GIB = 2**30
CUDA_CONTEXT = 0.92  # GiB, A100 and torch 2.1, the larger of two published measurements (stas00/ml-engineering)
FIRST_COLLECTIVE = 1.5  # GiB more after the first NCCL collective (the same source, 2 GPUs)


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        memory_gib: what torch sees as the device's total, GiB.
        outside_gib: what the process needs outside torch's allocator, GiB, with collectives.
        tflops: dense bf16 peak, 1e12 FLOP/s.
        efficiency: measured matrix product over peak.
        memory_tb_s: memory bandwidth, 1e12 B/s.
        link_gb_s, network_gb_s: 1e9 B/s per device, within a node and between nodes.
        node: devices of a node.
    """

    name: str
    memory_gib: float
    tflops: float
    efficiency: float
    memory_tb_s: float
    link_gb_s: float
    network_gb_s: float
    node: int = 8
    outside_gib: float = CUDA_CONTEXT + FIRST_COLLECTIVE
    source: str = ""


_NV = "NVIDIA data sheet"
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("a100-40gb", 39.39, 312, 0.87, 1.56, 300, 25, source=_NV),
            Device("a100-80gb", 79.15, 312, 0.87, 2.04, 300, 25, source=_NV),
            Device("h100-sxm", 79.11, 989, 0.80, 3.35, 450, 50, source=_NV),
            Device(
                "h100-96gb-500w", 94.99, 989, 0.80, 2.4, 450, 50,
                source="torchtitan benchmarks/README.md: HBM2e, 500 W; the peak is that of the 700 W part",
            ),
            Device("h200", 139.8, 989, 0.80, 4.8, 450, 50, source=_NV),
            Device("b200", 178.35, 2250, 0.78, 8.0, 900, 50, source=_NV),
            Device("mi300x", 191.98, 1307, 0.51, 5.3, 448, 50, source="AMD data sheet"),
        )
    }
)  # fmt: skip


def device_named(name: str, **replaced: float | None) -> Device:
    """A device of the table, or with `replaced` values any other.

    Raises:
        ConfigError: the name is unknown and `replaced` does not describe a device whole.
    """
    given = {key: value for key, value in replaced.items() if value is not None}
    if name in DEVICES:
        return replace(DEVICES[name], **given)  # type: ignore[arg-type]
    needed = ("memory_gib", "tflops", "memory_tb_s", "link_gb_s", "network_gb_s")
    if all(key in given for key in needed):
        known = {field.name for field in fields(Device)}
        values: dict[str, Any] = {"efficiency": 0.8, **{key: value for key, value in given.items() if key in known}}
        return Device(name, **values)
    near = get_close_matches(name, DEVICES, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f'device "{name}" is unknown{hint}; known are {", ".join(DEVICES)}, and --device_memory (GiB), '
        "--device_tflops, --device_memory_bandwidth (TB/s), --device_link and --device_network (GB/s) "
        "together describe any other"
    )
