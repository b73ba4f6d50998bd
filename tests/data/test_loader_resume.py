"""A blend with document masks, killed and resumed on other ranks and workers: the order of the samples."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_run import SEQ_LEN, arguments, losses, run, write_corpus
from titan_like.checkpoint import manager
from titan_like.config.errors import ConfigError
from titan_like.data.dataset import BlendedDataset, TokenDataset, open_training_data

REPO = Path(__file__).resolve().parents[2]
STEPS = 60


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "data__train": f'[{{prefix = "{folder}/a", weight = 70}}, {{prefix = "{folder}/b", weight = 30}}]',
        "data__reset_attention_mask": True,
        "data__reset_position_ids": True,
        "training__steps": STEPS,
        "training__local_batch_size": 2,
        "training__global_batch_size": 8,
        "checkpoint__enable": True,
        "checkpoint__interval": 3,
        "metrics__log_sample_ids": True,
        **more,
    }


def training_data(folder: Path) -> BlendedDataset | TokenDataset:
    names = [str(folder / "a"), str(folder / "b")]
    return open_training_data(names, [70, 30], SEQ_LEN, seed=0, documents=False, repeat=False)


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    lines = (run_folder / "sample_ids.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def expected(steps: int, batch: int) -> list[dict[str, Any]]:
    return [{"step": s + 1, "sample_ids": list(range(batch * s, batch * s + batch))} for s in range(steps)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b")):
        write_corpus(tmp_path / name, documents=60, seed=seed)
    return tmp_path


def start(run_folder: Path, world: int, **given: Any) -> list["subprocess.Popen[bytes]"]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = {
        **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-m", "titan_like.train", *arguments(run_folder, **given)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.timeout(290)
def test_r044_r045_r110_killed_at_any_step_and_resumed_on_other_ranks_and_workers(folder: Path) -> None:
    given = settings(folder, data__on_exhausted="stop")
    samples = len(training_data(folder))
    steps = samples // 8
    assert 15 < steps < STEPS and samples % 8  # the data end first
    run(folder / "straight", **given)
    assert steps_of(folder / "straight") == expected(steps, 8)

    random_step = int(np.random.default_rng().integers(4, steps - 5))
    (killed,) = start(folder / "run", 1, **given, data__num_workers=2)
    try:
        record, deadline = folder / "run" / "sample_ids.jsonl", time.monotonic() + 200
        while not record.exists() or len(record.read_text().splitlines()) < random_step:
            assert time.monotonic() < deadline and killed.poll() is None
            time.sleep(0.005)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert max(manager.list_steps(folder / "run" / "checkpoint")) < steps
    assert steps_of(folder / "run")[:random_step] == expected(random_step, 8)

    resumed = {**given, "data__num_workers": 1, "training__local_batch_size": 4, "checkpoint__resume": "auto"}
    ranks = start(folder / "run", 2, **resumed)
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]  # both stop at the end of the data
    finally:
        for rank in ranks:
            rank.kill()
    assert steps_of(folder / "run") == steps_of(folder / "straight"), f"killed after step {random_step}"
    assert max(manager.list_steps(folder / "run" / "checkpoint")) == steps
    found, wanted = losses(folder / "run"), losses(folder / "straight")
    assert found == pytest.approx(wanted, rel=1e-4)  # and so the same tokens


def test_r056_another_global_batch_goes_on_at_the_same_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "run", until=3, **settings(folder))
    capsys.readouterr()
    run(folder / "run", until=5, **settings(folder, training__global_batch_size=4, checkpoint__resume="auto"))
    assert "samples per step change from 8 to 4; the data go on at sample 24" in capsys.readouterr().out
    assert [line["sample_ids"] for line in steps_of(folder / "run")[3:]] == [[24, 25, 26, 27], [28, 29, 30, 31]]


def test_a_blend_is_part_of_the_data_that_a_checkpoint_belongs_to(folder: Path) -> None:
    run(folder / "run", until=3, **settings(folder))
    weights = settings(folder)["data__train"].replace("weight = 70", "weight = 71")
    with pytest.raises(ConfigError, match=r"other data \(data.train changed\)"):
        run(folder / "run", **settings(folder, data__train=weights, checkpoint__resume="auto"))


def test_r110_the_run_stops_with_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, given = (
        len(training_data(folder)),
        settings(folder, data__on_exhausted="stop", training__global_batch_size=32),
    )
    steps, unused = divmod(samples, 32)
    assert 1 < steps < STEPS and unused
    run(folder / "run", **given)
    out = capsys.readouterr().out
    assert f"{unused} of {samples} samples unused" in out and f"finished: step {steps} of {STEPS}" in out
    assert f"data {folder}/a: read " in out
    assert steps_of(folder / "run") == expected(steps, 32)
    assert max(manager.list_steps(folder / "run" / "checkpoint")) == steps
    assert losses(folder / "run").keys() == set(range(1, steps + 1))
    run(folder / "run", **{**given, "checkpoint__resume": "auto"})  # nothing is left: nothing happens
    assert steps_of(folder / "run") == expected(steps, 32)
    with pytest.raises(ConfigError, match=f"{samples} samples, fewer than the 1000"):
        run(folder / "short", **{**given, "training__global_batch_size": 1000})


def test_r036_data_shorter_than_one_sample_repeat_or_are_refused(folder: Path) -> None:
    write_corpus(folder / "one", documents=1)  # 20 to 79 tokens
    given = {"data__train": folder / "one", "training__seq_len": 64, "training__steps": 3}
    run(folder / "run", **given)
    assert losses(folder / "run").keys() == {1, 2, 3}
    write_corpus(folder / "none", documents=0)
    for more in ({"data__train": folder / "none"}, {"training__seq_len": 64, "data__on_exhausted": "stop"}):
        with pytest.raises(ConfigError, match=r"the data have \d+ tokens?, fewer than|samples, fewer than"):
            run(folder / "refused", **{**given, **more})
