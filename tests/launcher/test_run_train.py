"""run_train.sh itself, with a stand-in for Python."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.stand_in import REPO, FakePython


def start(fake: FakePython, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPO / "run_train.sh"), *args],
        env={**fake.env, **env}, cwd=cwd or fake.path.parent, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_first_try_uses_the_debug_config_samples_and_says_where_all_lies(fake_python: FakePython) -> None:
    done = start(fake_python, "--training.steps", "5")
    assert done.returncode == 0, done.stderr
    config = f"--job.config_file|{REPO}/train_configs/debug.toml|--training.steps|5|"
    assert fake_python.calls("titan_like.launch")[0].startswith(f"-m|titan_like.launch|{config}")
    assert fake_python.calls("titan_like.torchrun")[0].startswith(f"-m|titan_like.torchrun|{config}NPROC=2 OMP=")
    run = fake_python.env["FAKE_RUN"]
    assert fake_python.calls("generate.py")[0].startswith(
        f"{REPO}/scripts/generate.py|--checkpoint|{run}/checkpoint|--prompt|def |"
    )
    assert "def sampled" in done.stdout
    for place in (f"{run}\n", f"{run}/checkpoint\n", f"{run}/metrics.jsonl\n", f'--logdir "{run}"'):
        assert place in done.stdout


def test_a_run_without_a_sample_has_gone_well(fake_python: FakePython) -> None:
    """Such as one on data that came without a tokenizer; but a fault of the sampling is told."""
    done = start(fake_python, FAKE_GENERATE="2")
    assert done.returncode == 0 and "Run folder: " in done.stdout
    assert start(fake_python, FAKE_GENERATE="1").returncode == 1


@pytest.mark.parametrize("joined", [False, True])
def test_a_config_file_is_passed_on_as_it_is_from_any_folder(  # R143
    fake_python: FakePython, tmp_path: Path, joined: bool
) -> None:
    given = ["--job.config_file=my dir=1/a b.toml"] if joined else ["--job.config_file", "my dir=1/a b.toml"]
    done = start(fake_python, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert fake_python.calls("titan_like.torchrun")[0].startswith(
        "|".join(["-m", "titan_like.torchrun", *given, "NPROC"])
    )
    assert not fake_python.calls("generate.py")
    assert done.stdout == ""


def test_one_process_needs_no_torchrun(fake_python: FakePython) -> None:
    assert start(fake_python, "--job.config_file", "x.toml", NPROC="1").returncode == 0
    assert fake_python.calls("titan_like.train|") and not fake_python.calls("titan_like.torchrun")


def test_threads_are_shared_out_and_at_least_one(fake_python: FakePython) -> None:
    start(fake_python, NPROC="10000")
    start(fake_python, NPROC="2", OMP_NUM_THREADS="7")
    first, second = fake_python.calls("titan_like.torchrun")
    assert first.endswith("NPROC=10000 OMP=1") and second.endswith("NPROC=2 OMP=7")


@pytest.mark.parametrize(("visible", "processes"), [(None, 4), ("0,2", 2), ("1,-1,2", 1), ("", 2)])
def test_as_many_processes_as_visible_gpus(fake_python: FakePython, visible: str | None, processes: int) -> None:
    smi = fake_python.path.parent / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: H200 (UUID: GPU-$i)\"; echo '  MIG 1g'; done\n")
    smi.chmod(0o755)
    fake_python.env["PATH"] = f"{smi.parent}:{fake_python.env['PATH']}"
    fake_python.env.pop("CUDA_VISIBLE_DEVICES")
    start(fake_python, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert f"|NPROC={processes} " in fake_python.calls("titan_like.launch")[0]


def test_failed_checks_start_nothing(fake_python: FakePython) -> None:
    assert start(fake_python, FAKE_LAUNCH="2").returncode == 2
    assert not fake_python.calls("titan_like.torchrun") and not fake_python.calls("generate.py")


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("code", [1, 2, 137])
def test_exit_code_is_that_of_the_run(fake_python: FakePython, processes: str, code: int) -> None:
    done = start(fake_python, NPROC=processes, FAKE_TRAIN=f"exit {code}")
    assert done.returncode == code
    assert done.stdout == "", "nothing is sampled after a failure"


@pytest.mark.parametrize("flag", ["--help", "-h", "--print_config"])
def test_questions_are_answered_without_checks(fake_python: FakePython, flag: str) -> None:
    assert start(fake_python, "--training.steps", "5", flag).returncode == 0
    assert fake_python.calls("titan_like") == [f"-m|titan_like.train|--training.steps|5|{flag}|NPROC= OMP="]


def test_a_term_signal_reaches_the_run_and_its_exit_code_comes_back(fake_python: FakePython) -> None:
    train = "trap 'echo saved; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [REPO / "run_train.sh"], env={**fake_python.env, "FAKE_TRAIN": train}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "saved\n"
        assert process.wait(10) == 7


def test_slurm_s_warning_reaches_the_run(fake_python: FakePython) -> None:  # R167
    train = "trap 'echo saved; exit 75' USR1; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [REPO / "run_train.sh"],
        env={**fake_python.env, "FAKE_TRAIN": train, "MAX_RESTARTS": "3"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == "saved\n"  # once: what was stopped is not started again
        assert process.wait(10) == 75


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_run_that_failed_is_started_again_and_knows_it(fake_python: FakePython, processes: str) -> None:
    count = fake_python.path.parent / "count"
    train = f'echo "$TITAN_LIKE_LAUNCH $TITAN_LIKE_RESTARTS"; echo >> "{count}"; [ "$(wc -l < "{count}")" -ge 3 ]'
    config = ["--job.config_file", "x.toml"]
    done = start(fake_python, *config, FAKE_TRAIN=train, MAX_RESTARTS="5", NPROC=processes)
    assert done.returncode == 0, done.stderr
    launches, restarts = zip(*(line.rsplit(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert restarts == ("0", "1", "2") and len(set(launches)) == 1
    assert "The run failed (exit code 1): restart 2 of 5" in done.stderr
    count.unlink()
    assert start(fake_python, *config, FAKE_TRAIN=train, MAX_RESTARTS="1", NPROC=processes).returncode == 1
    done = start(fake_python, *config, FAKE_TRAIN="echo tried; exit 2", MAX_RESTARTS="5", NPROC=processes)
    assert done.returncode == 2 and done.stdout == "tried\n"  # it cannot be run as it is


def test_an_interrupt_from_the_keyboard_reaches_the_run(fake_python: FakePython) -> None:
    waits = (
        "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os._exit(9)); "
        "print('ready', flush=True); time.sleep(30)"
    )
    train = f'exec "{sys.executable}" -c "{waits}"'  # bash itself may die of the signal before its trap runs
    with subprocess.Popen(
        [REPO / "run_train.sh"], env={**fake_python.env, "FAKE_TRAIN": train}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.read() == ""
        assert process.wait(10) == 9


def test_slurm_says_where_the_nodes_meet(fake_python: FakePython) -> None:
    scontrol = fake_python.path.parent / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n')
    scontrol.chmod(0o755)
    slurm = {"STEP_NUM_NODES": "2", "NODEID": "1", "JOB_ID": "123456", "STEP_NODELIST": "node[7-8]"}
    fake_python.env["PATH"] = f"{scontrol.parent}:{fake_python.env['PATH']}"
    show = 'echo "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT"'
    done = start(fake_python, FAKE_TRAIN=show, **{f"SLURM_{name}": value for name, value in slurm.items()})
    assert done.stdout == "2 1 node7 23456\n", done.stderr
