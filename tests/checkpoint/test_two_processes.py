"""Stops and kills of a run with two FSDP ranks: what goes on is the run that was never stopped, bit by bit."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import arguments, logged, write_corpus
from titan_like.checkpoint import manager

REPO = Path(__file__).resolve().parents[2]
STEPS = {"training__steps": 8, "lr_schedule__warmup_steps": 2, "checkpoint__enable": True, "checkpoint__interval": 2}
RESUMING = {**STEPS, "checkpoint__resume": "auto"}

# One rank: a list of runs, one after the other, each with a rendezvous of its own.
WORKER = """
import json, os, signal, sys
import torch.distributed.checkpoint as dcp
from titan_like.config import load_config
from titan_like.trainer import Trainer

for port, argv, until, killed_at in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    trainer = Trainer(load_config(argv))
    if killed_at and os.environ["RANK"] == "1":
        save = dcp.save
        def killed(*arguments, **options):
            save(*arguments, **options)  # its shards are written, the checkpoint is not complete
            if trainer.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        dcp.save = killed
    trainer.fit(until)
    trainer.close()
"""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(270)]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def launch(folder: Path, *runs: tuple[list[str], int | None, int]) -> list[int]:
    """Two ranks that do the runs (arguments, last step or None, step at whose saving rank 1 is killed or 0)."""
    plan = json.dumps([(port, *run) for port, run in zip(free_ports(len(runs)), runs, strict=True)])
    common = {
        **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, plan], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=(folder / f"stderr-{rank}").open("w"),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def exact(run_folder: Path) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "lr", "processed_positions", "valid_labels")
    return [{key: line[key] for key in keys} for line in logged(run_folder)]


def test_stopped_or_killed_and_resumed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    straight, stopped, killed = (tmp_path / name for name in ("straight", "stopped", "killed"))
    codes = launch(
        tmp_path,
        (arguments(straight, **STEPS), None, 0),
        (arguments(stopped, **STEPS), 2, 0),
        (arguments(stopped, **RESUMING), 6, 0),
        (arguments(stopped, **RESUMING), None, 0),
        (arguments(killed, **STEPS), None, 6),
    )
    errors = (tmp_path / "stderr-0").read_text()
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL), errors  # rank 0 does not hang
    assert [line["step"] for line in exact(straight)] == list(range(1, 9))
    assert exact(straight)[2]["processed_positions"] == 3 * 2 * 2 * 16  # steps, ranks, sequences, tokens
    assert exact(stopped) == exact(straight)

    assert manager.list_steps(killed / "checkpoint") == [2, 4] and (killed / "checkpoint" / "step-6.tmp").is_dir()
    assert [line["step"] for line in exact(killed)] == [1, 2, 3, 4, 5, 6]
    assert launch(tmp_path, (arguments(killed, **RESUMING), None, 0)) == [0, 0], (tmp_path / "stderr-0").read_text()
    assert exact(killed) == exact(straight)
    assert sorted(path.name for path in (killed / "checkpoint").iterdir()) == ["step-4", "step-6", "step-8"]
    rng = sorted(path.name for path in (killed / "checkpoint" / "step-8").glob("rng-*"))
    assert rng == ["rng-0.pt", "rng-1.pt"]
