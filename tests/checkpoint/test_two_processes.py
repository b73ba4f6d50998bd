"""Runs with two FSDP ranks that are stopped, killed or resumed: what goes on is the run that was never stopped, bit by
bit."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint import ranks
from tests.tiny_run import arguments, logged, write_corpus
from titan_like.checkpoint import commit, manager, saver
from titan_like.checkpoint.storage import LOCAL, Entry, Folder, locate
from titan_like.config import load_config
from titan_like.trainer import Trainer

STEPS = {"training__steps": 8, "lr_schedule__warmup_steps": 2, "checkpoint__enable": True, "checkpoint__interval": 2}
RESUMING = {**STEPS, "checkpoint__resume": "auto"}
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def train(argv: list[str], until: int | None = None) -> None:
    trainer = Trainer(load_config(argv))
    trainer.fit(until)
    trainer.close()
    raise SystemExit(75 if trainer.stopped else 0)


def train_slowly(argv: list[str], seconds: float) -> None:
    step = Trainer._train_one_step

    def slow(self: Trainer, lr: float) -> Any:
        time.sleep(seconds)
        return step(self, lr)

    Trainer._train_one_step = slow  # type: ignore[method-assign]
    train(argv)


def train_until_killed(argv: list[str], step: int, after: str) -> None:
    """Rank 1 is killed while the checkpoint of `step` is saved, after its shards are written."""
    write = saver.dcp_save

    def killed(tensors: Any, path: Folder, group: Any) -> dict[str, Entry]:
        files = write(tensors, path, group) if after == "shards" else {}
        if os.environ["RANK"] == "1" and path.name.removesuffix(".tmp") == f"step-{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        return files or write(tensors, path, group)

    saver.dcp_save = killed
    train(argv)


def train_with_noise(argv: list[str], until: int | None = None) -> None:
    """As dropout would, each step depends on numbers that each rank draws for itself from every generator."""
    step = Trainer._train_one_step

    def noisy(self: Trainer, lr: float) -> Any:
        if self.counters.step == 1:
            torch.manual_seed(int(os.environ["RANK"]))
        return step(self, lr * (1 + random.random() + np.random.rand() + torch.rand(1).item()))

    Trainer._train_one_step = noisy  # type: ignore[method-assign]
    train(argv, until)


def train_with_slow_writer(argv: list[str], seconds: float) -> None:
    write = saver.dcp_save

    def slow(tensors: Any, path: Path, group: Any) -> dict[str, Entry]:
        time.sleep(seconds)
        return write(tensors, path, group)

    saver.dcp_save = slow
    train(argv)


def train_without_room(argv: list[str], step: int, rank: str) -> None:
    """From the checkpoint of `step` on, the disk of one rank is full."""
    write = saver.dcp_save

    def full(tensors: Any, path: Path, group: Any) -> dict[str, Entry]:
        files = write(tensors, path, group)
        if os.environ["RANK"] == rank and int(path.name[5:-4]) == step:
            raise OSError(28, "No space left on device", str(path / "__1_0.distcp"))
        return files

    saver.dcp_save = full
    train(argv)


def exact(run_folder: Path) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "lr", "processed_positions", "valid_labels")
    return [{key: line[key] for key in keys} for line in logged(run_folder) if "loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_corpus(path / "train")
    assert ranks.run(2, train, arguments(path / "straight", **STEPS), output=path / "straight-out") == [0, 0]
    return path


def test_stops_change_no_bit_in_any_mode(folder: Path) -> None:
    straight = exact(folder / "straight")
    assert [line["step"] for line in straight] == list(range(1, 9))
    assert straight[2]["processed_positions"] == 3 * 2 * 2 * 16  # steps, ranks, sequences, tokens
    for mode in ("disabled", "thread", "process"):
        run = folder / mode
        for until in (3, 6, None):  # step 3 and its like are not saved: what was done after step 2 is done again
            argv = arguments(run, **RESUMING, checkpoint__async_mode=mode)
            assert ranks.run(2, train, argv, until, output=folder / "out") == [0, 0], ranks.said(folder / "out")
        assert exact(run) == straight
        assert manager.list_steps(run / "checkpoint") == [4, 6, 8]
        assert sorted(path.name for path in (run / "checkpoint" / "step-8").glob("rng-*")) == ["rng-0.pt", "rng-1.pt"]
        shards = Path("checkpoint", "step-6", "__1_0.distcp")
        assert LOCAL.measure(run / shards) == LOCAL.measure(folder / "straight" / shards)


def test_the_random_numbers_of_every_rank_go_on(folder: Path) -> None:  # R063
    out, settings = folder / "out", {**RESUMING, "training__global_batch_size": 16}  # four micro-batches
    for until, name in ((None, "noise"), (3, "noise-stopped"), (6, "noise-stopped"), (None, "noise-stopped")):
        argv = arguments(folder / name, **settings, checkpoint__async_mode="thread")
        assert ranks.run(2, train_with_noise, argv, until, output=out) == [0, 0], ranks.said(out)
    assert exact(folder / "noise-stopped") == exact(folder / "noise")
    drawn = [torch.load(folder / "noise" / "checkpoint" / "step-8" / f"rng-{rank}.pt")["torch"] for rank in (0, 1)]
    assert not torch.equal(*drawn)  # each had its own


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.parametrize("after", ["shards", "nothing"])
def test_a_rank_that_dies_while_saving(folder: Path, mode: str, after: str) -> None:  # R067
    run, out = folder / f"killed-{mode}-{after}", folder / "out"
    argv = arguments(run, **STEPS, checkpoint__async_mode=mode)
    started = time.monotonic()
    codes = ranks.run(2, train_until_killed, argv, 6, after, output=out)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL), ranks.said(out)
    assert time.monotonic() - started < 60  # rank 0 does not wait for the dead
    assert manager.list_steps(run / "checkpoint") == [2, 4] and (run / "checkpoint" / "step-6.tmp").is_dir()
    assert ranks.run(2, train, arguments(run, **RESUMING), output=out) == [0, 0], ranks.said(out)
    assert exact(run) == exact(folder / "straight")
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-4", "step-6", "step-8"]


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_a_rank_that_dies_while_it_writes_to_a_store(folder: Path, mode: str) -> None:  # R067
    """file:// stands for it: there too all is written under the final name, and the manifest makes it a checkpoint."""
    run, out = folder / f"store-{mode}", folder / "out"
    url = f"file://{folder}/bucket-{mode}"
    argv = arguments(run, **STEPS, checkpoint__async_mode=mode, checkpoint__folder=url)
    codes = ranks.run(2, train_until_killed, argv, 6, "shards", output=out)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL), ranks.said(out)
    store = locate(url)
    assert manager.list_steps(store) == [2, 4] and commit.uncommitted_steps(store) == [6]
    assert (store / "step-6" / "__1_0.distcp").exists() and not (run / "checkpoint").exists()
    settings = {**RESUMING, "checkpoint__folder": url, "checkpoint__async_mode": mode}
    assert ranks.run(2, train, arguments(run, **settings), 7, output=out) == [0, 0], ranks.said(out)
    assert f"removing {url}/step-6, which was never completed" in ranks.said(out)
    assert f"resumed from {url}/step-4" in ranks.said(out)
    assert ranks.run(1, train, arguments(run, **settings, training__local_batch_size=4), output=out) == [0]
    assert f"resumed from {url}/step-6" in ranks.said(out)
    straight, resumed = exact(folder / "straight"), exact(run)
    assert resumed[:6] == straight[:6]  # of two ranks; the last two steps were those of one
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in straight], rel=1e-5)
    assert manager.list_steps(store) == [4, 6, 8]
    assert commit.find_damage(store / "step-8", hashes=True) == []


def test_validation_at_the_steps_that_are_saved(folder: Path) -> None:
    run, out = folder / "validated", folder / "out"
    settings = {
        "data__validation": folder / "train", "validation__interval": 2, "validation__samples": 5,
        "checkpoint__async_mode": "thread", "checkpoint__interval": 1,
    }  # fmt: skip
    argv = arguments(run, **{**STEPS, **settings})
    assert ranks.run(2, train_until_killed, argv, 7, "shards", output=out)[1] == -signal.SIGKILL
    assert ranks.run(2, train, arguments(run, **{**RESUMING, **settings}), output=out) == [0, 0], ranks.said(out)
    assert f"resumed from {run}/checkpoint/step-6" in ranks.said(out)
    assert exact(run) == exact(folder / "straight")


def test_nothing_is_deleted_before_the_next_is_complete(folder: Path) -> None:  # R068
    run, out = folder / "early", folder / "out"
    settings = {**STEPS, "checkpoint__async_mode": "thread", "checkpoint__keep_latest_k": 1, "training__steps": 4}
    settings |= {"lr_schedule__decay_steps": 0}
    processes = ranks.start(2, train_with_slow_writer, arguments(run, **settings), 1.5, output=out)
    deadline = time.monotonic() + 60
    while not (run / "checkpoint" / "step-4.tmp").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (run / "checkpoint" / "step-4.tmp").is_dir(), ranks.said(out)
    for process in processes:
        process.kill()
    ranks.wait(processes)
    assert manager.list_steps(run / "checkpoint") == [2]
    assert commit.find_damage(run / "checkpoint" / "step-2", hashes=True) == []


def test_a_full_disk_stops_the_run_or_is_told(folder: Path) -> None:  # R075, R078
    out = folder / "out"
    for mode in ("disabled", "thread"):
        run = folder / f"full-{mode}"
        argv = arguments(run, **STEPS, checkpoint__async_mode=mode)
        assert ranks.run(2, train_without_room, argv, 4, "1", output=out) == [1, 1]
        for rank in range(2):  # each of them names the cause
            assert f"the checkpoint of step 4 could not be written to {run}/checkpoint/step-4" in ranks.said(out, rank)
            assert "No space left on device" in ranks.said(out, rank) and "(rank 1)" in ranks.said(out, rank)
        assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2"]  # the room is given back

        run = folder / f"on-{mode}"
        argv = arguments(run, **STEPS, checkpoint__async_mode=mode, checkpoint__on_error="continue")
        assert ranks.run(2, train_without_room, argv, 4, "1", output=out) == [0, 0], ranks.said(out)
        assert "No space left on device" in ranks.said(out) and "going on (checkpoint.on_error" in ranks.said(out)
        assert exact(run) == exact(folder / "straight")
        assert manager.list_steps(run / "checkpoint") == [2, 6, 8]

        run = folder / f"last-{mode}"  # without the last checkpoint the run is not complete
        argv = arguments(run, **STEPS, checkpoint__async_mode=mode, checkpoint__on_error="continue")
        assert ranks.run(2, train_without_room, argv, 8, "0", output=out) == [1, 1], ranks.said(out)
        assert manager.list_steps(run / "checkpoint") == [2, 4, 6]


def test_a_signal_to_one_rank_stops_all_at_the_same_whole_step(folder: Path) -> None:  # R057, R163
    out = folder / "out"
    for number, mode in ((signal.SIGTERM, "thread"), (signal.SIGUSR1, "disabled"), (signal.SIGINT, "process")):
        run = folder / number.name
        settings = {"training__global_batch_size": 8, **STEPS}  # two micro-batches per step
        processes = ranks.start(
            2, train_slowly, arguments(run, **settings, checkpoint__async_mode=mode), 0.2, output=out
        )
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or len(logged(run)) < 3:
            assert time.monotonic() < deadline, ranks.said(out)
            time.sleep(0.02)
        pid = processes[1].pid
        assert pid is not None
        os.kill(pid, number)
        os.kill(pid, number)  # a copy of the same request, from another sender
        assert ranks.wait(processes) == [75, 75], ranks.said(out)
        assert f"{number.name}: stopping at the end of the step" in ranks.said(out, 1)
        stopped = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        assert 3 <= stopped <= 5 and manager.list_steps(run / "checkpoint")[-1] == stopped
        assert f"stopped after step {stopped} of 8 (another rank asked)" in ranks.said(out)
        assert ranks.run(2, train, arguments(run, **{**settings, **RESUMING}), output=out) == [0, 0]
    straight = folder / "accumulated"
    assert ranks.run(2, train, arguments(straight, **settings), output=out) == [0, 0]
    assert exact(folder / "SIGTERM") == exact(folder / "SIGUSR1") == exact(folder / "SIGINT") == exact(straight)


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    run, out = folder / "twice", folder / "out"
    processes = ranks.start(1, train_slowly, arguments(run, **STEPS), 8.0, output=out)
    deadline = time.monotonic() + 60
    while not (run / "config.toml").exists():
        assert time.monotonic() < deadline, ranks.said(out)
        time.sleep(0.02)
    time.sleep(0.5)
    pid = processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    time.sleep(2.2)
    os.kill(pid, signal.SIGTERM)
    assert ranks.wait(processes, timeout=10) == [128 + signal.SIGTERM]
    assert "SIGTERM again: ending at once" in ranks.said(out)
    assert manager.list_steps(run / "checkpoint") == []


def test_an_attempt_after_a_crash_goes_on_with_what_its_launch_has_saved(folder: Path) -> None:
    run, out = folder / "attempts", folder / "out"
    assert ranks.run(2, train, arguments(run, **STEPS), 4, output=out, env={"TITAN_LIKE_LAUNCH": "old"}) == [0, 0]
    env = {"TITAN_LIKE_LAUNCH": "new", "TITAN_LIKE_RESTARTS": "1"}
    # The first attempt failed before it saved: the checkpoints there are another run's, which resume=never sets aside.
    assert ranks.run(2, train, arguments(run, **STEPS), 6, output=out, env=env) == [0, 0]
    assert manager.list_steps(run / "checkpoint") == [2, 4, 6]
    assert manager.list_steps(run / "previous-1" / "checkpoint") == [2, 4]
    assert ranks.run(2, train, arguments(run, **STEPS), output=out, env={**env, "TITAN_LIKE_RESTARTS": "2"}) == [0, 0]
    assert f"resumed from {run}/checkpoint/step-6" in ranks.said(out)
    assert exact(run) == exact(folder / "straight")


def test_another_number_of_ranks_reads_on_where_these_stopped(folder: Path) -> None:  # R045, R056
    run, out = folder / "ranks", folder / "out"
    settings = {"training__global_batch_size": 4}
    argv = arguments(run, **STEPS, **settings)
    assert ranks.run(2, train, argv, 4, output=out) == [0, 0]
    assert ranks.run(1, train, arguments(run, **RESUMING, **settings), 6, output=out) == [0]
    assert "it was saved by 2 ranks, 1 go on" in ranks.said(out)
    argv = arguments(run, **RESUMING, **settings, training__local_batch_size=1)
    assert ranks.run(4, train, argv, output=out) == [0] * 4
    assert "no random state for rank 3" in ranks.said(out, 3)
    straight, resumed = exact(folder / "straight"), exact(run)  # the same 4 sequences per step
    for key in ("step", "lr", "processed_positions", "valid_labels"):
        assert [line[key] for line in resumed] == [line[key] for line in straight]
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in straight], rel=1e-5)
