"""What is known of accelerators: memory, peaks and bandwidths, each from a data sheet or a published measurement.

`efficiency` is the share of the bf16 peak that large matrix products of random numbers were measured to keep up, not
the best of all shapes: A100 257 TFLOP/s (thonking.ai, "Strangely, matrix multiplications run faster when given
predictable data"), H100 and H200 720, MI300X 620 (SemiAnalysis, "MI300X vs H100 vs H200 benchmark", part 1; float8:
1,280 and 990), the 500 W H100 and B200 torchao's float8/roofline_utils.py (the first value it had for that H100; an
FFN of Llama 3 8B, forward and backward, was profiled at 554 and 600 in bf16 and at 1,083 in float8, another product at
1,114: meta-pytorch/float8_experimental pull requests 282 and 298, pytorch issue 130015; that is 0.57 of the peak where
all multiprocessors are in use).
Bandwidths are one way, per device. Shares of attention are those of causal kernels at head size 128 and 16,384 tokens
(arXiv:2407.08608, figures 5 and 6, for H100; arXiv:2307.08691, section 4.1, for A100). The published backward of H100
is not causal: it is scaled by what the mask costs the forward (335 / 370); so are both of MI300X, 355 and 202 TFLOP/s
(ROCm/flash-attention issue 142: ROCm 6.3, composable kernels). Its memory gives 4.2 TB/s (ROCm/legacy-rocm-build issue
5070), its links 48 of 64 GB/s each (rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance").
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import tomli
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from titan_like.config.errors import ConfigError

GIB = 2**30
LEAST, MOST = 0.001, 1_000_000  # of what a device can have, in any of the units here
Amount = Annotated[float, Field(ge=LEAST, le=MOST, strict=True)]
Extra = Annotated[float, Field(ge=0, le=MOST, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]
CUDA_CONTEXT = 0.92  # GiB, A100 and torch 2.1, the larger of two published measurements (stas00/ml-engineering)
FIRST_COLLECTIVE = 1.5  # GiB more after the first NCCL collective (the same source, 2 GPUs)


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        memory_gib: what torch sees as the device's total, GiB.
        outside_gib: what the process needs outside torch's allocator, GiB, with one NCCL communicator.
        tflops: dense bf16 peak, 1e12 FLOP/s.
        efficiency: measured matrix product over peak.
        memory_tb_s: memory bandwidth, 1e12 B/s.
        link_gb_s, network_gb_s: 1e9 B/s per device, within a node and between nodes.
        node: devices of a node.
        memory_share: measured bandwidth of large pointwise kernels over the peak (torchao, roofline_utils.py).
        link_share: measured collective over link and network (torchao, its roofline benchmarks; nccl-tests on A100).
        float8: measured float8 product over its peak, which is twice the bf16 peak; 0: there is none.
        flash, cudnn: measured causal attention over the bf16 peak, forward and backward; None: not published.
        units: multiprocessors, which matrix products and collectives share.
        communicator_gib: what each further NCCL communicator needs; 0: not measured (titan-estimate calibrate does).
    """

    name: str
    memory_gib: Amount
    tflops: Amount
    efficiency: Share
    memory_tb_s: Amount
    link_gb_s: Amount
    network_gb_s: Amount
    node: Count = 8
    outside_gib: Extra = CUDA_CONTEXT + FIRST_COLLECTIVE
    source: str = ""
    memory_share: Share = 0.92
    link_share: Share = 0.80
    float8: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    flash: tuple[Share, Share] | None = None
    cudnn: tuple[Share, Share] | None = None
    units: Count = 132
    communicator_gib: Extra = 0.0
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # of what a file says

    def outside(self, communicators: int) -> float:
        """GiB outside of the allocator of a process that is in so many communicators."""
        return self.outside_gib + self.communicator_gib * max(0, communicators - 1)


_NV = "NVIDIA data sheet"
_A100: dict[str, Any] = dict(source=_NV, flash=(0.73 * 335 / 370, 0.63 * 335 / 370), units=108)
_H100: dict[str, Any] = dict(flash=(335 / 989, 322 / 989 * 335 / 370), cudnn=(539 / 989, 516 / 989 * 335 / 370))
# Meta's H100 (pytorch/benchmark pull request 2296: 304 TFLOP/s where the paper's 700 W part has 370).
_500W: dict[str, Any] = {kernel: tuple(share * 304 / 370 for share in shares) for kernel, shares in _H100.items()}
_MI300X: dict[str, Any] = dict(
    source="AMD data sheet", flash=(355 / 1307 * 335 / 370, 202 / 1307 * 335 / 370), link_share=0.75, memory_share=0.79
)
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("a100-40gb", 39.39, 312, 0.82, 1.56, 300, 25, **_A100),
            Device("a100-80gb", 79.15, 312, 0.82, 2.04, 300, 25, **_A100),
            Device("h100-sxm", 79.11, 989, 0.73, 3.35, 450, 50, source=_NV, float8=0.65, **_H100),
            Device(
                "h100-96gb-500w", 94.99, 989, 0.60, 2.4, 450, 50, float8=0.57, **_500W,
                source="torchtitan benchmarks/README.md: HBM2e, 500 W; the peak is that of the 700 W part",
            ),
            Device("h200", 139.8, 989, 0.73, 4.8, 450, 50, source=_NV, float8=0.65, **_H100),
            Device("b200", 178.35, 2250, 0.69, 8.0, 900, 50, source=_NV, float8=0.775, units=148, cudnn=_H100["cudnn"]),
            Device("mi300x", 191.98, 1307, 0.47, 5.3, 448, 50, float8=0.38, units=304, **_MI300X),
        )
    }
)  # fmt: skip


def device_named(name: str, **replaced: float | None) -> Device:
    """A device of the table or of a file that calibrate wrote; with `replaced` values any other.

    Raises:
        ConfigError: the name is unknown and `replaced` does not describe a device whole, or the file is none.
    """
    given = {key: value for key, value in replaced.items() if value is not None}
    needed = ("memory_gib", "tflops", "memory_tb_s", "link_gb_s", "network_gb_s")
    is_described = all(key in given for key in needed)
    if name in DEVICES or name.endswith(".toml") or (Path(name).is_file() and not is_described):
        return replace(DEVICES[name] if name in DEVICES else _read(Path(name)), **given)  # type: ignore[arg-type]
    if is_described:
        known = {field.name for field in fields(Device)}
        values: dict[str, Any] = {"efficiency": 0.7, **{key: value for key, value in given.items() if key in known}}
        return Device(name, **values)
    near = get_close_matches(name, DEVICES, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f'device "{name}" is unknown{hint}; known are {", ".join(DEVICES)}, and --device_memory (GiB), '
        "--device_tflops, --device_memory_bandwidth (TB/s), --device_link and --device_network (GB/s) "
        "together describe any other, as does a file from titan-estimate calibrate"
    )


def _read(path: Path) -> Device:
    try:
        return TypeAdapter(Device).validate_python(tomli.loads(path.read_text()))
    except ValidationError as error:
        wrong = ", ".join(_wrong(entry["type"], entry["loc"], entry["input"], entry["msg"]) for entry in error.errors())
    except OSError as error:
        wrong = f"it cannot be read ({error.strerror})"
    except ValueError as error:
        wrong = f"it is not TOML ({error})"
    raise ConfigError(f'device "{path}": {wrong}; give a file as titan-estimate calibrate writes it')


def _wrong(kind: str, place: tuple[int | str, ...], value: Any, message: str) -> str:
    """What is wrong with a value, and what is allowed."""
    key = ".".join(map(str, place))
    missing = {"missing": f"{key} is missing", "unexpected_keyword_argument": f"{key} is no key of a device"}
    return missing.get(kind, f"{key} is {value!r} ({message[0].lower()}{message[1:]})")
