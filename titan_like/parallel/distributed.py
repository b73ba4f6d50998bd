"""Starting and ending the process group, with and without torchrun."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_like.config.errors import ConfigError
from titan_like.device import collective_backend


def init_process_group(device: torch.device, init_timeout_seconds: int) -> None:
    """Join the group that torchrun (or Slurm) describes in the environment; alone, make a group of one.

    Raises:
        ConfigError: the rendezvous address cannot be reached or its port is in use.
    """
    options = dict(backend=collective_backend(device), timeout=timedelta(seconds=init_timeout_seconds))
    if "RANK" not in os.environ:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
        return
    try:
        dist.init_process_group(**options)
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(f"the rendezvous at {address} failed ({error}); choose another MASTER_PORT") from None


def set_timeout(seconds: int) -> None:
    """The limit of one collective from now on; generous at the start, tight in the loop."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))  # private; checked on 2.13


def close_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
