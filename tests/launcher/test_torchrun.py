"""titan_like.torchrun with real processes: which output is shown, which error is last, which exit code comes back."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.stand_in import REPO
from titan_like.stop import EXIT_CODE
from titan_like.torchrun import outputs, rendezvous

WORKER = """
import os, signal, sys, time
import torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
print(f"hello from {rank}", flush=True)
if how in ("raise", "exit", "kill", "wait"):
    dist.init_process_group("gloo")
if rank == 1:
    if how == "raise": raise ValueError("sample 17 is broken")
    if how == "exit": sys.exit(3)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":
    print("ready", flush=True)
    time.sleep(60)
if how in ("raise", "exit", "kill"):
    dist.barrier()
if how == "stop":
    def stop(number, frame):
        print("got", signal.Signals(number).name, flush=True)
        time.sleep(0.3 * rank)  # torchrun ends the others as soon as one has left
        for other in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(other, signal.SIG_IGN)
        sys.exit(75)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, stop)
if how == "stubborn":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, signal.SIG_IGN)
if how in ("stop", "stubborn"):
    print("ready", flush=True)
    time.sleep(60)
"""

pytestmark = pytest.mark.distributed


def launch(tmp_path: Path, how: str, **env: str) -> subprocess.Popen[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    code = f"import os, sys; from titan_like.torchrun import main; sys.exit(main([{how!r}], os.environ, 'worker'))"
    paths = {"PYTHONPATH": f"{REPO}:{tmp_path}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "NPROC": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **paths, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_two_jobs_at_once_show_one_rank_each_and_leave_no_logs(tmp_path: Path) -> None:  # R168
    jobs = [launch(tmp_path, "pass"), launch(tmp_path, "pass", LOG_RANK="1")]
    shown = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert shown == ["hello from 0\n", "hello from 1\n"]
    assert not list(tmp_path.glob("titan_like_logs_*"))


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("raise", 1, "ValueError: sample 17 is broken"),
        ("exit", 3, "(none)"),
        ("kill", 137, "(none)"),
    ],
)
def test_the_rank_that_failed_first_has_the_last_word(tmp_path: Path, how: str, code: int, last: str) -> None:  # R169
    job = launch(tmp_path, how)
    start = time.monotonic()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == code
    assert time.monotonic() - start < 30
    assert errors.splitlines()[-1].endswith(last), errors
    assert f"Rank 1 failed first ({'killed by SIGKILL' if how == 'kill' else f'exit code {code}'}" in errors
    (logs,) = tmp_path.glob("titan_like_logs_*")
    assert str(logs) in errors and "hello from 1" in next(logs.glob("*/attempt_0/1/stdout.log")).read_text()


def test_a_term_signal_ends_all_processes(tmp_path: Path) -> None:
    job = launch(tmp_path, "wait")
    assert job.stdout and [job.stdout.readline() for _ in range(2)] == ["hello from 0\n", "ready\n"]
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert "killed by SIGTERM" in errors


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_ranks_that_stop_when_asked_are_no_failure(tmp_path: Path, name: str) -> None:  # R163, R167
    job = launch(tmp_path, "stop")
    assert job.stdout and [job.stdout.readline() for _ in range(2)] == ["hello from 0\n", "ready\n"]
    time.sleep(0.5)  # until the other rank is ready too
    job.send_signal(getattr(signal, name))
    shown, errors = job.communicate(timeout=60)
    assert job.returncode == EXIT_CODE == 75, errors
    assert shown == f"got {name}\n" and "failed" not in errors
    assert not list(tmp_path.glob("titan_like_logs_*"))


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    job = launch(tmp_path, "stubborn")
    assert job.stdout and [job.stdout.readline() for _ in range(2)] == ["hello from 0\n", "ready\n"]
    job.terminate()
    time.sleep(0.2)
    job.terminate()  # a copy of the first
    time.sleep(2.2)
    assert job.poll() is None
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("titan_like_logs_*"))


def test_where_the_processes_meet() -> None:
    assert rendezvous({"NPROC": "2"}) == ["--nnodes", "1", "--nproc-per-node", "2", "--standalone"]
    named = rendezvous({"NPROC": "2", "MASTER_PORT": "1234"})
    assert named[4:] == ["--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "1234"]
    nodes = rendezvous({"NPROC": "8", "NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "a"})
    assert " ".join(nodes) == "--nnodes 4 --nproc-per-node 8 --node-rank 3 --master-addr a --master-port 29500"


def test_several_shown_ranks_are_told_apart_and_the_rest_is_hidden() -> None:
    assert outputs({"NPROC": "3", "LOG_RANK": "0,2"})[4:] == ["--tee", "0:3,2:3", "--redirects", "1:3"]
    assert outputs({"NPROC": "1"})[4:] == ["--tee", "0:2"]
