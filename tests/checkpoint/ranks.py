"""Ranks as processes that are forked from one that has imported everything: a launch takes tens of milliseconds.

What a rank does is a function of a module, called with picklable arguments. A rank that raises prints its traceback and
leaves with 1, at once.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "titan_like.trainer", "titan_like.oracle", "tests.tiny_run"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start(
    world: int, function: Callable[..., None], *arguments: Any, output: Path, env: dict[str, str] | None = None
) -> list[BaseProcess]:
    """Start `world` ranks; rank r writes to <output>-<r>."""
    port, processes = free_port(), []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **(env or {})}
        process = FORKS.Process(target=_rank, args=(function, arguments, place, f"{output}-{rank}"))
        process.start()
        processes.append(process)
    return processes


def run(
    world: int, function: Callable[..., None], *arguments: Any, output: Path, env: dict[str, str] | None = None
) -> list[int]:
    """Start and wait: the exit codes, negative for a signal."""
    return wait(start(world, function, *arguments, output=output, env=env))


def wait(processes: list[BaseProcess], timeout: float = 120) -> list[int]:
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in codes, f"a rank hangs: {codes}"
    return [code for code in codes if code is not None]


def said(output: Path, rank: int = 0) -> str:
    return Path(f"{output}-{rank}").read_text()


def _rank(function: Callable[..., None], arguments: tuple[Any, ...], place: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(place)
    import torch

    torch.set_num_threads(1)
    try:
        function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    sys.stdout.flush()
    sys.stderr.flush()
