"""Initial weights as a function of (seed, parameter name): bit-equal on every mesh, each rank drawing little more
than its own shard.

The virtual full tensor is cut into blocks of BLOCK_ROWS rows (dim 0); block b of parameter `name` is drawn in fp32 on
the CPU from a generator seeded by a hash of (seed, name, b), then sliced to the rows and columns that the rank holds.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_like.models.decoder import canonical_name, init_constant, init_std
from titan_like.models.flavors import ModelConfig

BLOCK_ROWS = 256  # part of the definition of the initial weights: never change it


@torch.no_grad()
def init_weights(named_parameters: Iterator[tuple[str, nn.Parameter]], config: ModelConfig, seed: int) -> None:
    """Fill materialised parameters in place (plain tensors or DTensors of any Shard/Replicate placement)."""
    for local_name, parameter in named_parameters:
        name = canonical_name(local_name, config)
        std = init_std(name, config)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if std is None:
            local.fill_(init_constant(name))
        elif local.numel():
            ranges = local_ranges(parameter)
            for rows, values in _drawn_blocks(name, seed, std, tuple(parameter.shape), ranges):
                local[rows] = values.to(local.device, local.dtype)


def local_ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """Global [start, stop) that this rank holds, per tensor dim."""
    ranges = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return ranges
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    # FSDP over a tensor-parallel dim is a _StridedShard, stored first but applied to what the plain Shard left.
    shards = [(i, p) for i, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    for i, placement in sorted(shards, key=lambda pair: (hasattr(pair[1], "split_factor"), pair[0])):
        start, stop = ranges[placement.dim]
        chunk = -(-(stop - start) // tensor.device_mesh.size(i))  # torch.chunk's rule: the last shards may be short
        low = min(start + chunk * coordinate[i], stop)
        ranges[placement.dim] = (low, min(low + chunk, stop))
    return ranges


def _drawn_blocks(
    name: str, seed: int, std: float, shape: tuple[int, ...], ranges: list[tuple[int, int]]
) -> Iterator[tuple[slice, Tensor]]:
    (first, last), rest = ranges[0], tuple(slice(*r) for r in ranges[1:])
    for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
        low, high = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, shape[0])
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(high - low, *shape[1:]).normal_(0, std, generator=generator)
        start, stop = max(low, first), min(high, last)
        yield slice(start - first, stop - first), drawn[(slice(start - low, stop - low), *rest)]
