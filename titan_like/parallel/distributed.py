"""Starting and ending the process group, with and without torchrun."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_like.config.errors import ConfigError
from titan_like.device import collective_backend


def init_process_group(device: torch.device, init_timeout_seconds: int, store: dist.Store | None = None) -> None:
    """Join the group that torchrun describes in the environment; alone, make a group of one.

    Args:
        store: where the ranks meet, instead of at the environment's address.
    Raises:
        ConfigError: the rendezvous address cannot be reached or its port is in use.
    """
    backend, timeout = collective_backend(device), timedelta(seconds=init_timeout_seconds)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = store or _environment_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(f"the rendezvous at {address} failed ({error}); choose another MASTER_PORT") from None


def _environment_store(timeout: timedelta) -> dist.Store:
    """At MASTER_ADDR and MASTER_PORT. torchrun may keep the store when it restarts the ranks: each attempt has keys of
    its own, or some ranks would find the addresses of their dead predecessors (seen with torch 2.13)."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def set_timeout(seconds: int) -> None:
    """The limit of one collective from now on; generous at the start, tight in the loop."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))  # private; checked on 2.13


def new_cpu_group(init_timeout_seconds: int, timeout_seconds: int) -> dist.ProcessGroup:
    """Of all ranks, for CPU tensors and objects; collective. A rank that dies while it is made is waited for only as
    long as at the start, one that is late afterwards for `timeout_seconds`."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=init_timeout_seconds))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)
    return group


def close_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
