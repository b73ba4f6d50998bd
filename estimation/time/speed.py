"""Seconds of a kernel on a device: a roofline, the larger of arithmetic and memory traffic, each at a measured rate."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from estimation.devices import DEVICES, Device
from titan_like.config.errors import ConfigError

Attention = Literal["flash", "cudnn"]
LAUNCH = 2e-6  # s: a kernel of one element on H100 (torchao, roofline_utils.py)
# Norms, gates and sums of a block, with reductions along rows and columns, as torch has them and as inductor compiles
# them: measured 0.81 and 0.50 of the peak on the 500 W H100, where large pointwise kernels have 0.92 (step_time.md).
EAGER_SHARE, FUSED_SHARE = 0.88, 0.54
FP32_SHARE = 1 / 16  # of the bf16 peak, without TF32: data sheets of A100 (19.5 / 312) and H100 (67 / 989)
TILES = ((128, 256), (256, 128), (128, 128))  # of the output, which cuBLAS and CUTLASS give to a multiprocessor
WARM_UP = 300  # tokens: flash attention on H100 reaches 0.57, 0.78, 0.89, 0.95 of its best at 512 to 4096 tokens


@dataclass(frozen=True)
class Speed:
    """The rates of one device.

    Attributes:
        attention: the kernel that the trainer calls, where its speed is known.
    """

    device: Device
    attention: Attention = "flash"

    def moving(self, size: float, share: float = 1.0) -> float:
        """Seconds for reading and writing `size` bytes in one kernel, at a share of what large pointwise ones reach."""
        return LAUNCH + size / (self.device.memory_tb_s * 1e12 * self.device.memory_share * share) if size else 0.0

    def product(self, rows: int, inner: int, columns: int, number: int, *, is_float8: bool = False) -> float:
        """(rows x inner) times (inner x columns) in numbers of `number` bytes; float8 reads one byte and writes two."""
        device = self.device
        peak, share = device.tflops * 1e12, device.efficiency
        if is_float8:
            peak, share = 2 * peak, device.float8
        elif number == 4:
            peak *= FP32_SHARE
        if not share:
            raise ConfigError(f"{device.name} has no float8 matrix products; choose another --device")
        share *= waves(rows, columns, device.units)
        read = 1 if is_float8 else number
        moved = read * (rows * inner + inner * columns) + number * rows * columns
        return max(2.0 * rows * inner * columns / (peak * share), self.moving(moved))

    def attend(self, flops: float, seq_len: int, number: int, *, is_backward: bool = False) -> float:
        """Causal attention of `flops` operations that count, over `seq_len` tokens."""
        peak = self.device.tflops * 1e12 * (FP32_SHARE if number == 4 else 1.0)
        return flops / (peak * self._attention_shares[is_backward] * seq_len / (seq_len + WARM_UP))

    @property
    def _attention_shares(self) -> tuple[float, float]:
        """Where nobody has published any: as much less than a matrix product as on H100."""
        device, known = self.device, DEVICES["h100-sxm"]
        found = getattr(device, self.attention) or device.flash or device.cudnn
        if found is not None:
            return found
        assert known.flash is not None
        return known.flash[0] * device.efficiency / known.efficiency, known.flash[
            1
        ] * device.efficiency / known.efficiency


@lru_cache(maxsize=4096)
def waves(rows: int, columns: int, units: int) -> float:
    """Share of the multiprocessors that have a tile of the output, over all rounds of tiles; the best of TILES."""
    counts = (-(-rows // height) * -(-columns // width) for height, width in TILES)
    return max(count / (-(-count // units) * units) for count in counts)
