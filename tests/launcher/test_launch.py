"""titan_like.launch: what is refused before a process starts."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.stand_in import REPO
from titan_like import launch
from titan_like.config import Config, load_config


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("env", "processes"),
    [({}, 1), ({"NPROC": "4"}, 4), ({"NPROC": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}, 16)],
)
def test_world_size(env: dict[str, str], processes: int) -> None:
    assert launch.check_environment(env) == (processes, [])


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"NPROC": "0"}, ["NPROC is '0'", "1 or more", "one per GPU"]),
        ({"NPROC": "-2"}, ["NPROC is '-2'", "1 or more"]),
        ({"NPROC": "two"}, ["NPROC is 'two'", "whole number"]),
        ({"NPROC": "²"}, ["NPROC is '²'", "whole number"]),
        ({"NNODES": "1.5"}, ["NNODES is '1.5'", "1 or more"]),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, ["NODE_RANK is '2'", "0 to 1"]),
        ({"NNODES": "2", "NODE_RANK": "1"}, ["MASTER_ADDR is not set", "NNODES is 2"]),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, ["NODE_RANK is not set", "NNODES is 2"]),
        ({"MASTER_PORT": "65536"}, ["MASTER_PORT is '65536'", "1 to 65535"]),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, ["8 tasks on 2 nodes", "--ntasks-per-node=1"]),
    ],
)
def test_bad_launcher_variables(env: dict[str, str], told: list[str]) -> None:
    _, problems = launch.check_environment(env)
    assert len(problems) == 1
    assert all(words in problems[0] for words in told), problems


def test_all_bad_variables_are_told_at_once() -> None:
    world_size, problems = launch.check_environment({"NPROC": "x", "NNODES": "0", "MASTER_PORT": "-1"})
    assert world_size == 0
    assert [problem.split()[0] for problem in problems] == ["NPROC", "NNODES", "MASTER_PORT"]


def test_port_in_use(listener: int) -> None:  # R168
    _, (problem,) = launch.check_environment({"NPROC": "2", "MASTER_PORT": str(listener)})
    assert f"MASTER_PORT {listener}" in problem and "in use" in problem and "choose a free one" in problem
    other_node = {"NPROC": "2", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": str(listener)}
    assert launch.check_environment(other_node) == (4, []), "only the node with rank 0 listens"
    assert launch.check_environment({"NPROC": "1", "MASTER_PORT": str(listener)}) == (1, []), (
        "one process needs no port"
    )


def test_processes_that_no_mesh_fits() -> None:
    config = load_config(["--parallelism.data_parallel_replicate_degree", "2", "--training.seq_len", "8"])
    assert launch.check_settings(config, 4) == []
    (problem,) = launch.check_settings(config, 3)
    assert "(3)" in problem and "data_parallel_replicate_degree (2)" in problem


def test_model_and_sequence_length() -> None:
    (unknown,) = launch.check_settings(load_config(["--model.flavor", "7Z"]), 1)
    assert "7Z" in unknown
    llama2 = ["--model.name", "llama2", "--model.flavor", "7B", "--training.seq_len"]
    assert launch.check_settings(load_config([*llama2, "4096"]), 1) == []
    (long,) = launch.check_settings(load_config([*llama2, "4097"]), 1)
    assert "training.seq_len (4097)" in long and "4096 tokens" in long


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        (problem,) = launch.check_folder("job.dump_folder", str(folder))
        assert f'job.dump_folder is "{folder}"' in problem and "choose another" in problem
    assert launch.check_folder("job.dump_folder", str(tmp_path / "new" / "folder")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_what_needs_more_ranks_or_fewer(tmp_path: Path) -> None:
    memory = load_config([f"--job.dump_folder={tmp_path}", "--checkpoint.folder=memory://here"])
    assert launch.check_settings(memory, 1) == []
    (problem,) = launch.check_settings(memory, 2)
    assert "memory://here" in problem and "the memory of one process, but there are 2" in problem
    argv = ["--profiling.enable_profiling", "--profiling.profiler_ranks=0,2", "--profiling.profile_freq=5"]
    profiling = load_config([f"--job.dump_folder={tmp_path}", *argv])
    assert launch.check_settings(profiling, 3) == []
    (problem,) = launch.check_settings(profiling, 2)
    assert "profiling.profiler_ranks names rank 2, but there are 2 ranks" in problem


NEEDS_A_GPU = [  # with what else it takes
    ("activation_checkpoint.mode auto", "--activation_checkpoint.mode=auto"),
    ("comm.backend nccl", "--comm.backend=nccl"),
    ("float8.enable", "--float8.enable", "--float8.filter_fqns=output"),
    ("parallelism.enable_async_tensor_parallel", "--parallelism.enable_async_tensor_parallel", "--compile.enable",
     "--parallelism.tensor_parallel_degree=2"),
    ("profiling.enable_memory_snapshot", "--profiling.enable_memory_snapshot"),
    ("estimation.preflight abort", "--estimation.preflight=abort"),
]  # fmt: skip


def test_all_that_needs_a_gpu_is_told_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*more: str) -> list[str]:
        asked = [argument for _, *arguments in NEEDS_A_GPU for argument in arguments]
        return launch.check_settings(load_config([f"--job.dump_folder={tmp_path}/run", *asked, *more]), 2)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "GPU_FILES", (tmp_path / "none",))
    problems = told()
    assert [problem.partition(" needs a GPU")[0] for problem in problems] == [name for name, *_ in NEEDS_A_GPU]
    assert all("but no GPU is found on this machine; " in problem for problem in problems)
    # Two of them ask for a memory, which a name has too; a fake world has no device at all.
    assert len(told("--estimation.device=h200")) == len(NEEDS_A_GPU) - 2
    assert [problem.split()[0] for problem in told("--comm.mode=fake")] == ["activation_checkpoint.mode"]
    monkeypatch.setattr(launch, "GPU_FILES", (tmp_path / "none", tmp_path))
    assert told() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert len(told()) == len(NEEDS_A_GPU) and 'CUDA_VISIBLE_DEVICES is "-1"' in told()[0]
    assert len(told("--comm.backend=gloo")) == len(NEEDS_A_GPU) - 1


def main(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "titan_like.launch", *args],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO), **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_main_tells_all_problems_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    typo, alone = ("--training.stesp", "5"), ("--compile.components", "loss")
    done = main(tmp_path, *typo, *alone, "--job.dump_folder", "file/x", "--model.flavor", "7Z", NPROC="none")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 5 and all(line.startswith("error: ") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no corpus is prepared for a run that cannot start"


def test_main_refuses_missing_data_and_typos(tmp_path: Path) -> None:
    missing = main(tmp_path, "--data.train", "my/shards", "--data.validation", "[]")
    assert missing.returncode == 2 and "my/shards" in missing.stderr
    typo = main(tmp_path, "--training.stesp", "5")
    assert typo.returncode == 2 and "training.steps" in typo.stderr
    assert list(tmp_path.iterdir()) == []


def test_main_prepares_the_default_corpus_and_prints_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def prepare(prefixes: list[str]) -> None:
        print("preparing")
        asked.append(prefixes)

    def check(config: Config) -> list[str]:
        assert asked, "data are checked after they were prepared"
        return []

    monkeypatch.setattr(launch, "ensure_default", prepare)
    monkeypatch.setattr(launch, "check_shards", check)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"NPROC": "2"})
    launch.main(["--job.dump_folder", "my run"])
    assert asked == [["data/stdlib/train", "data/stdlib/validation"]]
    printed = capsys.readouterr()
    assert printed.out == f"real\n{tmp_path}/my run\n{tmp_path}/my run/checkpoint\n"
    assert printed.err == "preparing\n"


def test_no_torch_is_imported() -> None:
    code = "import sys, titan_like.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPO)}, timeout=60, check=True)


def test_a_shape_that_the_mesh_cannot_cut_is_refused_before_any_process_starts() -> None:
    """R095: 1 key/value head on 2 tensor-parallel ranks."""
    config = load_config(["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=1"])
    assert any("does not divide n_kv_heads (1)" in problem for problem in launch.check_settings(config, 2))


def test_recompute_of_every_nth_layer_needs_n_layers() -> None:
    every = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option"]
    assert launch.check_settings(load_config([*every, "4"]), 1) == []
    (problem,) = launch.check_settings(load_config([*every, "5"]), 1)
    assert "selective_ac_option (5) recomputes every 5th layer, but llama3 debug has 4" in problem


def test_a_schedule_that_cannot_be_read_is_told_with_all_else() -> None:
    argv = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=nowhere.csv"]
    told = launch.check_settings(load_config([*argv, "--model.flavor=1B"], checks=None), 3)
    assert len(told) == 2 and "world size (3)" in told[0] and "nowhere.csv cannot be used" in told[1]


def test_a_fake_world_needs_no_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", {"NPROC": "512"})
    launch.main(["--comm.mode", "fake", "--data.train", "nowhere/train", "--data.validation", "[]"])
    assert capsys.readouterr().out.startswith("fake\n")
