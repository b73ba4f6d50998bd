"""A run that was stopped and resumed is the run that was never stopped, bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import arguments, config, logged, losses, run, write_corpus
from titan_like.checkpoint import manager
from titan_like.checkpoint.storage import locate
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.parallel.distributed import close_process_group
from titan_like.trainer import Trainer

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
RESUMING = {**SAVING, "checkpoint__resume": "auto"}
EXACT = ("step", "loss", "grad_norm", "lr", "processed_positions", "valid_labels")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_corpus(tmp_path / "train")
    yield tmp_path
    close_process_group()


def exact(run_folder: Path) -> list[dict[str, Any]]:
    """The logged values that must not depend on stops; the clock's may."""
    return [{key: line[key] for key in EXACT} for line in logged(run_folder) if "loss" in line]


def same_tensors(one: Trainer, other: Trainer) -> bool:
    ours, theirs = one.recovery.tensors(), other.recovery.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_any_number_of_stops_changes_no_bit(folder: Path, shape: str) -> None:  # R049, R060
    settings: dict[str, Any] = {
        "training__steps": 10, "training__global_batch_size": 4, "lr_schedule__warmup_steps": 3,
        "lr_schedule__decay_steps": 5, "lr_schedule__decay_type": shape,
    }  # fmt: skip
    straight = run(folder / "straight", **settings)
    for stop in (3, 5, 6, 7, 10):
        resumed = run(folder / "stopped", until=stop, **settings, **RESUMING)
    assert exact(folder / "stopped") == exact(folder / "straight")
    assert [line["step"] for line in logged(folder / "straight")] == list(range(1, 11))
    assert same_tensors(straight, resumed)
    assert len(set(losses(folder / "straight").values())) == 10


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.parametrize("reshard", ["default", "never"])
def test_a_validation_changes_nothing_in_the_checkpoint_of_its_step(folder: Path, mode: str, reshard: str) -> None:
    """FSDP wraps one rank in bf16 too, and keeps gathered parameters after a forward that no backward follows."""
    write_corpus(folder / "validation", documents=10, seed=1)
    settings: dict[str, Any] = {
        "training__mixed_precision_param": "bfloat16", "parallelism__fsdp_reshard_after_forward": reshard,
        "data__validation": folder / "validation", "validation__interval": 2, "validation__samples": 3,
    }  # fmt: skip
    saving = {"checkpoint__async_mode": mode, "checkpoint__interval": 1, **settings}
    run(folder / "straight", **settings)
    run(folder / "stopped", until=4, **{**SAVING, **saving})
    run(folder / "stopped", **{**RESUMING, **saving})
    assert exact(folder / "stopped") == exact(folder / "straight")


def test_more_steps_than_first_planned(folder: Path) -> None:
    constant = {"lr_schedule__decay_steps": 0}
    run(folder / "straight", training__steps=6, **constant)
    run(folder / "longer", training__steps=4, **constant, **SAVING)
    run(folder / "longer", training__steps=6, **constant, **RESUMING)
    assert exact(folder / "longer") == exact(folder / "straight")
    assert manager.list_steps(folder / "longer" / "checkpoint") == [1, 2, 3, 4, 5, 6]


def test_nothing_to_do_is_said_and_harms_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "run", **SAVING)
    before = exact(folder / "run")
    run(folder / "run", **RESUMING)
    assert "nothing to do: raise training.steps (6) to go on" in capsys.readouterr().out
    assert exact(folder / "run") == before


def test_auto_without_a_checkpoint_starts_anew_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "run", **RESUMING)  # R081
    assert f"no checkpoint in {folder}/run/checkpoint: starting from step 0" in capsys.readouterr().out
    assert len(losses(folder / "run")) == 6


def test_only_the_newest_are_kept(folder: Path) -> None:  # R073
    run(folder / "run", **{**SAVING, "checkpoint__keep_latest_k": 2})
    assert manager.list_steps(folder / "run" / "checkpoint") == [5, 6]
    run(folder / "other", **{**SAVING, "checkpoint__interval": 4, "checkpoint__folder": folder / "elsewhere"})
    assert manager.list_steps(folder / "elsewhere") == [4, 6]


def test_an_earlier_step_drops_what_came_after_it(folder: Path) -> None:  # R156
    run(folder / "straight", training__steps=8, metrics__enable_tensorboard="true")
    run(folder / "run", until=6, training__steps=8, metrics__enable_tensorboard="true", **SAVING)
    settings = {**SAVING, "checkpoint__resume": 4, "training__steps": 8, "metrics__enable_tensorboard": "true"}
    run(folder / "run", **settings)
    assert exact(folder / "run") == exact(folder / "straight")
    assert manager.list_steps(folder / "run" / "checkpoint") == list(range(1, 9))
    assert manager.list_steps(folder / "run" / "previous-1" / "checkpoint") == [5, 6]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload().Scalars("loss")
    assert [event.step for event in events] == list(range(1, 9))
    assert [event.value for event in events] == pytest.approx(list(losses(folder / "run").values()), rel=1e-6)


def test_random_state_goes_on(folder: Path) -> None:
    trainer = Trainer(config(folder / "run", **SAVING))
    torch.rand(3)
    trainer.fit(until=2)
    trainer.close()
    expected = torch.rand(3)
    resumed = Trainer(config(folder / "run", **RESUMING))
    found = torch.rand(3)
    resumed.close()
    assert torch.equal(found, expected)


def test_a_checkpoint_before_the_first_applied_step_can_be_resumed(folder: Path) -> None:
    def spoil(trainer: Trainer, until: int) -> None:
        parameter = trainer.model.parts[0].get_parameter("norm.weight")
        parameter.register_hook(lambda gradient: gradient * float("nan"))
        trainer.fit(until)
        trainer.close()

    spoil(Trainer(config(folder / "run", **SAVING)), until=2)
    run(folder / "run", **RESUMING)
    found = losses(folder / "run")
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    expected = Trainer(config(folder / "expected"))
    expected.data.batches.load_state_dict({"consumed_samples": 4})  # two steps of two samples, which changed nothing
    expected.counters.step = 2
    expected.fit()
    expected.close()
    assert {step: found[step] for step in (3, 4, 5, 6)} == losses(folder / "expected")


def test_the_saved_config_repeats_the_run(folder: Path) -> None:  # R147
    (folder / "given.toml").write_text("[training]\nseed = 5\n[optimizer]\nweight_decay = 0.3\n")
    argv = [argument for argument in arguments(folder / "run", checkpoint__enable=True)]
    trainer = Trainer(load_config(["--job.config_file", str(folder / "given.toml"), *argv]))
    trainer.fit()
    trainer.close()
    for saved in (folder / "run" / "config.toml", folder / "run" / "checkpoint" / "step-6" / "config.toml"):
        again = folder / f"again-{saved.parent.name}"
        trainer = Trainer(load_config(["--job.config_file", str(saved), f"--job.dump_folder={again}"]))
        trainer.fit()
        trainer.close()
        assert exact(again) == exact(folder / "run")
    run(folder / "other")
    assert exact(folder / "other") != exact(folder / "run")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model__overrides__n_layers": 3, "model__overrides__ffn_dim": 48},
         r"step-6 holds another model \(n_layers is 2, not 3; ffn_dim is 32, not 48\); set the model as it was"),
        ({"data__seed": 1}, r"step-6 was trained with other settings \(data.seed was 0, is 1\), so this would be"),
        ({"training__seq_len": 8}, r"other settings \(training.seq_len was 16, is 8\)"),
        ({"optimizer__betas": "0.9,0.99", "training__max_norm": 2.0},
         r"\(training.max_norm was 1.0, is 2.0; optimizer.betas was \[0.9, 0.95\], is \(0.9, 0.99\)\)"),
        ({"checkpoint__resume": 7}, r"checkpoint.resume is 7, but .*/checkpoint has the steps 4, 6; choose one"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_refused_and_untouched(folder: Path, settings: dict[str, Any], sentence: str) -> None:
    saving = {**SAVING, "checkpoint__interval": 4}
    run(folder / "run", **saving)
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=sentence):
        run(folder / "run", **{**saving, "checkpoint__resume": "auto", **settings})
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before
    assert manager.list_steps(folder / "run" / "checkpoint") == [4, 6]


def test_other_data_under_the_same_name_are_refused(folder: Path) -> None:
    run(folder / "run", **SAVING)
    write_corpus(folder / "train", documents=39)
    with pytest.raises(ConfigError, match=r"other data \(data.train changed\)"):
        run(folder / "run", **{**RESUMING, "training__steps": 8})


def test_what_changed_is_listed_and_what_does_not_matter_is_free(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder / "straight", training__steps=8, training__global_batch_size=2, lr_schedule__decay_steps=0)
    constant = {"lr_schedule__decay_steps": 0, "training__global_batch_size": 2}
    run(folder / "run", **SAVING, **constant)
    capsys.readouterr()
    free = {"training__steps": 8, "training__local_batch_size": 1, "data__num_workers": 1, "metrics__log_freq": 2}
    run(folder / "run", **{**RESUMING, **constant, **free})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since")]
    assert said == [
        "changed since step-6: training.steps was 6, is 8",
        "changed since step-6: training.local_batch_size was 2, is 1",
        "changed since step-6: data.num_workers was 0, is 1",
        "changed since step-6: metrics.log_freq was 1, is 2",
    ]
    assert losses(folder / "run")[8] == pytest.approx(losses(folder / "straight")[8], rel=1e-6)


def test_another_run_can_be_allowed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "run", **SAVING)
    more = {**RESUMING, "training__steps": 8, "checkpoint__allow_changes": True}
    resumed = run(folder / "run", **more, optimizer__lr=0.02)
    assert "changed since step-6: optimizer.lr was 0.01, is 0.02" in capsys.readouterr().out
    assert resumed.data.batches.consumed == 16  # the data go on
    resumed = run(folder / "run", **{**more, "training__steps": 9}, optimizer__lr=0.02, data__seed=3)
    assert "other data than before (data.seed changed): they begin at their start" in capsys.readouterr().out
    assert resumed.data.batches.consumed == 2 and resumed.counters.step == 9


def test_a_damaged_checkpoint_is_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "straight", training__steps=8, lr_schedule__decay_steps=0)
    run(folder / "run", **SAVING, lr_schedule__decay_steps=0)
    damaged = folder / "run" / "checkpoint" / "step-6" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run(folder / "run", **RESUMING, training__steps=8, lr_schedule__decay_steps=0)
    said = capsys.readouterr().out
    assert f"DAMAGED CHECKPOINT passed over: {damaged} has" in said
    assert f"resumed from {folder}/run/checkpoint/step-5" in said
    assert (folder / "run" / "previous-1" / "checkpoint" / "step-6").is_dir()  # set aside, not deleted
    assert exact(folder / "run") == exact(folder / "straight")


def test_any_step_can_be_the_one_before_the_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SAVING, "checkpoint__interval": 100, "checkpoint__stop_after_seconds": 1}
    stopped = run(folder / "run", **settings)  # this process is older
    assert stopped.stopped and stopped.counters.step == 1
    assert "stopped after step 1 of 6 (checkpoint.stop_after_seconds (1))" in capsys.readouterr().out
    assert manager.list_steps(folder / "run" / "checkpoint") == [1]
    finished = run(folder / "run", **{**RESUMING, "checkpoint__interval": 100})
    assert not finished.stopped and finished.counters.step == 6


def test_an_error_while_saving_that_is_gone_on_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder / "straight")
    elsewhere = folder / "elsewhere"
    trainer = Trainer(config(folder / "run", **SAVING, checkpoint__folder=elsewhere, checkpoint__on_error="continue"))
    trainer.fit(until=2)
    elsewhere.rename(folder / "away")
    elsewhere.write_text("where the folder was")  # as good as not mounted
    trainer.fit(until=4)
    elsewhere.unlink()
    (folder / "away").rename(elsewhere)
    trainer.fit()
    trainer.close()
    assert manager.list_steps(elsewhere) == [1, 2, 5, 6]
    assert exact(folder / "run") == exact(folder / "straight")


def test_a_run_whose_checkpoints_lie_in_a_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on from there, in another run folder too, and never writes over what an earlier run has left there."""
    url = f"memory://bucket{folder}"
    store, stored = locate(url), {"checkpoint__folder": url}
    straight = run(folder / "straight")
    run(folder / "run", until=3, **SAVING, **stored)
    assert manager.list_steps(store) == [1, 2, 3] and not (folder / "run" / "checkpoint").exists()
    (store / "step-3" / "record.json").unlink()
    resumed = run(folder / "run", **RESUMING, **stored)
    said = capsys.readouterr().out
    assert f"{url}/step-3/record.json is missing" in said and f"resumed from {url}/step-2" in said
    assert exact(folder / "run") == exact(folder / "straight") and same_tensors(straight, resumed)
    assert manager.list_steps(store) == [1, 2, 3, 4, 5, 6]
    assert manager.list_steps(store / "previous-1") == [3]  # the damaged one was in the way

    run(folder / "trial", until=1, **stored)  # saves nothing, so it leaves them
    assert manager.list_steps(store) == [1, 2, 3, 4, 5, 6]
    run(folder / "anew", until=1, **SAVING, **stored)
    assert manager.list_steps(store) == [1] and manager.list_steps(store / "previous-2") == [1, 2, 3, 4, 5, 6]
    elsewhere = run(folder / "elsewhere", training__steps=8, **RESUMING, **stored)
    assert elsewhere.counters.step == 8 and manager.list_steps(store) == list(range(1, 9))
