"""Copies of tensors in host memory, so that training goes on while they are written.

The only place that builds a DTensor by its constructor: from_local would move the copy back to the mesh's device.
Checked on torch 2.13.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Buffers for the tensors that are saved, allocated at the first use and kept: one more copy of this rank's state.

    Args:
        shared: in memory that another process can read.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors with values that later steps do not change; overwrites those of the last call."""
        staged, on_gpu = {}, False
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(name)
            if buffer is None:
                buffer = self._buffers[name] = self._allocate(local)
            buffer.copy_(local, non_blocking=True)
            on_gpu |= local.is_cuda
            staged[name] = DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
        if on_gpu:
            torch.cuda.synchronize()
        return staged

    def _allocate(self, local: Tensor) -> Tensor:
        if self._shared:
            return torch.empty(local.shape, dtype=local.dtype).share_memory_()
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
