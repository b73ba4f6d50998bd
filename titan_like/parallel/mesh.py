"""One world mesh with named axes.

Ranks are laid out pp > dp_replicate > dp_shard > cp > tp, the last varying fastest. `fsdp` is dp_shard x cp: a
context-parallel rank holds a shard of the parameters too.
"""

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_like.config.schema import Parallelism

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Views of one world mesh.

    Attributes:
        axes: 5-D, in the order of AXES.
        sharding: 4-D (pp, dp_replicate, fsdp, tp), what FSDP and tensor parallelism place parameters on.
    """

    axes: DeviceMesh
    sharding: DeviceMesh

    def degree(self, *axes: str) -> int:
        """Number of ranks along one axis, or the product over several."""
        return math.prod(self.axes.size(AXES.index(axis)) for axis in axes)

    def size(self) -> int:
        """Number of ranks in the world."""
        return self.axes.size()

    @property
    def batch_rank(self) -> int:
        """Which part of the global batch this rank reads, out of degree("dp_replicate", "dp_shard")."""
        return (
            self.axes["dp_replicate"].get_local_rank() * self.degree("dp_shard")
            + self.axes["dp_shard"].get_local_rank()
        )

    def describe(self) -> str:
        """One line with the axes larger than one."""
        used = [f"{axis} {self.degree(axis)}" for axis in AXES if self.degree(axis) > 1]
        return " x ".join(used) or "one process"


def build_mesh(device_type: str, parallelism: Parallelism) -> Mesh:
    """Lay the world out over the axes; a shard degree of -1 takes what the others leave, see config/checks.py."""
    pp, replicate = parallelism.pipeline_parallel_degree, parallelism.data_parallel_replicate_degree
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = dist.get_world_size() // (pp * replicate * cp * tp)
    world = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("world",))
    # Two views of one root mesh, so that DTensors of FSDP and of tensor parallelism know of each other. DeviceMesh has
    # no public way to split an axis; _unflatten is checked on torch 2.13.
    return Mesh(
        axes=world._unflatten(0, (pp, replicate, shard, cp, tp), AXES),
        sharding=world._unflatten(0, (pp, replicate, shard * cp, tp), ("pp", "dp_replicate", "fsdp", "tp")),
    )
