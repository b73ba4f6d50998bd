"""The run as a whole, in this process, on a corpus and a model made for it."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_run import SEQ_LEN, VOCAB, config, logged, losses, run, write_corpus
from titan_like.config import ConfigError
from titan_like.data.dataset import TokenDataset
from titan_like.models.decoder import Decoder
from titan_like.parallel.distributed import close_process_group
from titan_like.trainer import NonFiniteError, Trainer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_corpus(tmp_path / "train")
    yield tmp_path
    close_process_group()


def initial_weights(run_folder: Path, **settings: Any) -> dict[str, Tensor]:
    trainer = Trainer(config(run_folder, **settings))
    trainer.close()
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def mean_loss(model: Decoder, samples: list[Any]) -> float:
    """Mean cross entropy over all labels of some samples, one after the other, in fp64."""
    rows = [torch.from_numpy(sample)[None] for sample in samples]
    positions = torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        logits = [model(row[:, :-1], positions).double() for row in rows]
    return float(F.cross_entropy(torch.cat(logits).flatten(0, 1), torch.cat(rows)[:, 1:].flatten()))


def test_a_run_writes_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "run", metrics__log_freq=4)
    lines = logged(folder / "run")
    assert [line["step"] for line in lines] == [1, 4, 6]  # the first, every fourth, the last
    assert lines[0].keys() == {
        "step", "loss", "grad_norm", "lr", "processed_positions", "valid_labels", "tokens_per_s", "mfu", "data_wait",
        "memory_gib/rss",
    }  # fmt: skip
    assert [line["processed_positions"] for line in lines] == [32, 128, 192]  # 2 sequences of 16 per step
    assert [line["lr"] for line in lines] == pytest.approx([0.01, 0.01 * 3 / 6, 0.01 / 6])  # linear over 6 steps
    assert all(line["mfu"] is None and line["tokens_per_s"] > 0 for line in lines)  # R154
    out = capsys.readouterr().out
    assert out.count("mfu n/a") == 3 and "step 4/6  loss " in out
    assert f"finished: step 6 of 6; everything lies in {folder}/run" in out
    assert (folder / "run" / "config.toml").is_file() and not (folder / "run" / "checkpoint").exists()


def test_what_the_device_cannot_do_is_told_together_and_moves_no_earlier_run(folder: Path) -> None:
    """The launcher looks without torch, which may see no GPU where a driver is."""
    earlier = [path.name for path in run(folder / "run", training__steps=1).recovery.run_folder.iterdir()]
    asked = {"float8.enable": None, "profiling.enable_memory_snapshot": None, "profiling.profile_freq": 1}
    with pytest.raises(ConfigError) as refused:
        Trainer(config(folder / "run", **asked))
    assert [problem.split()[0] for problem in refused.value.problems] == [*asked][:2]
    assert all("but this run's device is the CPU" in problem for problem in refused.value.problems)
    assert [path.name for path in (folder / "run").iterdir()] == earlier


def test_a_forecast_is_logged_where_a_device_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("h200", ""):
        run(folder / "run", training__steps=1, estimation__device=device)
        out = capsys.readouterr().out
        assert out.count("memory forecast: fits: ") == bool(device)


def test_it_learns(folder: Path) -> None:
    run(folder / "run", training__steps=60, training__local_batch_size=8)
    found = losses(folder / "run")
    assert found[1] == pytest.approx(math.log(VOCAB), abs=0.1)  # knows nothing
    assert found[60] < 0.6 * found[1]  # every next token is the last one plus 1


def test_positions_count_once_with_accumulation_and_over_a_resume(folder: Path) -> None:  # R151
    settings = {
        "training__steps": 3, "training__local_batch_size": 2, "training__global_batch_size": 4,
        "checkpoint__enable": True, "checkpoint__interval": 1,
    }  # fmt: skip
    run(folder / "run", until=2, **settings)
    run(folder / "run", **settings, checkpoint__resume="auto")
    assert [line["processed_positions"] for line in logged(folder / "run")] == [64, 128, 192]
    assert [line["valid_labels"] for line in logged(folder / "run")] == [64, 128, 192]


def test_the_logged_loss_is_the_one_of_all_micro_batches(folder: Path) -> None:  # R157
    trainer = Trainer(config(folder / "parts", training__local_batch_size=2, training__global_batch_size=8))
    dataset = TokenDataset([folder / "train"], SEQ_LEN, seed=0)
    expected = mean_loss(trainer.model.parts[0], [dataset[k] for k in range(8)])
    last_only = mean_loss(trainer.model.parts[0], [dataset[k] for k in (6, 7)])
    trainer.fit()
    trainer.close()
    run(folder / "whole", training__local_batch_size=8)
    parts, whole = losses(folder / "parts"), losses(folder / "whole")
    assert abs(expected - last_only) > 1e-3
    assert parts[1] == pytest.approx(expected, rel=1e-6)
    assert list(parts.values()) == pytest.approx(list(whole.values()), rel=1e-5)
    norms = [[line["grad_norm"] for line in logged(folder / name)] for name in ("parts", "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_validation_is_exact_and_leaves_no_trace(folder: Path) -> None:  # R016, R162
    write_corpus(folder / "validation", documents=10, seed=1)
    validating = {"data__validation": folder / "validation", "validation__interval": 2, "validation__samples": 3}
    trainer = run(folder / "with", **validating)
    run(folder / "without")
    assert losses(folder / "with") == losses(folder / "without")
    found = [line for line in logged(folder / "with") if "validation_loss" in line]
    assert [line["step"] for line in found] == [2, 4, 6]
    assert [line["validation_labels"] for line in found] == [48, 48, 48]  # batches of 2 and 1: means of unequal weight
    held_out = TokenDataset([folder / "validation"], SEQ_LEN, seed=0, shuffle=False)
    expected = mean_loss(trainer.model.parts[0], [held_out[k] for k in range(3)])
    assert found[-1]["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert len({line["validation_loss"] for line in found}) == 3
    model = trainer.model.parts[0]
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_time_outside_the_steps_is_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(folder / "validation", documents=10, seed=1)
    trainer = Trainer(
        config(
            folder / "run", metrics__log_freq=6, checkpoint__enable=True, checkpoint__interval=4,
            data__validation=folder / "validation", validation__interval=2,
        )
    )  # fmt: skip
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    slow = {"_train_one_step": 1.0, "tensors": 100.0, "validation": 1000.0}

    def takes(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            now[0] += slow[name]
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(trainer, "_train_one_step", takes("_train_one_step", trainer._train_one_step))
    monkeypatch.setattr(trainer.recovery, "tensors", takes("tensors", trainer.recovery.tensors))
    monkeypatch.setattr(trainer.data, "validation_batches", takes("validation", lambda: []))
    monkeypatch.setattr("titan_like.trainer.evaluation_step", lambda *a, **o: (0.0, 1))
    trainer.fit()
    trainer.close()
    rates = [line["tokens_per_s"] for line in logged(folder / "run") if "loss" in line]
    assert rates == [32.0, 32.0]  # 32 tokens per step of one second


def spoil_gradient(trainer: Trainer, step: int, factor: float) -> None:
    parameter = trainer.model.parts[0].get_parameter("norm.weight")
    parameter.register_hook(lambda gradient: gradient * (factor if trainer.counters.step == step else 1.0))


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_step_with_a_bad_gradient_is_skipped(folder: Path, factor: float, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(config(folder / "run"))
    spoil_gradient(trainer, step=3, factor=factor)
    trainer.fit(until=2)
    before = {name: tensor.clone() for name, tensor in trainer.recovery.tensors().items()}
    trainer.fit(until=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.recovery.tensors().items())
    trainer.fit()
    trainer.close()
    assert "step 3 skipped: the gradient of step 3 is not finite (loss 4." in capsys.readouterr().out
    lines = logged(folder / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, False, False, False]


def test_a_bad_gradient_can_end_the_run(folder: Path) -> None:
    trainer = Trainer(config(folder / "run", training__skip_nonfinite="false"))
    spoil_gradient(trainer, step=3, factor=math.inf)
    with pytest.raises(
        NonFiniteError, match=r"gradient of step 3 is not finite .*; set training.skip_nonfinite"
    ) as caught:
        trainer.fit()
    assert caught.value.exit_code == 1
    assert list(losses(folder / "run")) == [1, 2]


def test_steps_that_are_not_logged_are_looked_at_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are read when a step is logged or saved; what went wrong in between is told then, with its step."""
    trainer = Trainer(config(folder / "run", metrics__log_freq=5))
    spoil_gradient(trainer, step=3, factor=math.nan)
    trainer.fit()
    trainer.close()
    assert "step 3 skipped: the gradient of step 3 is not finite" in capsys.readouterr().out
    lines = {line["step"]: line for line in logged(folder / "run")}
    assert list(lines) == [1, 5, 6]
    assert [line["valid_labels"] for line in lines.values()] == [32, 160, 192]
    stopping = Trainer(config(folder / "stop", metrics__log_freq=5, training__skip_nonfinite="false"))
    spoil_gradient(stopping, step=3, factor=math.nan)
    with pytest.raises(NonFiniteError, match="gradient of step 3"):
        stopping.fit()
    assert list(losses(folder / "stop")) == [1]


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.01), ("sgd", 0.1)])
def test_every_optimizer_moves_weights_that_fsdp_has_wrapped(folder: Path, optimizer: str, lr: float) -> None:
    """In bf16 FSDP wraps one rank too; not every fused kernel of torch 2.13 knows its tensors."""
    run(folder / "run", optimizer__name=optimizer, training__mixed_precision_param="bfloat16", optimizer__lr=lr)
    values = list(losses(folder / "run").values())
    assert len(values) == 6 and values[-1] < values[0]


def test_garbage_is_collected_at_chosen_steps_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(folder / "run", training__gc_freq=2))
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr("gc.collect", lambda: seen.append((trainer.counters.step, gc.isenabled())) or 0)
    trainer.fit()
    trainer.close()
    assert seen == [(0, True), (2, False), (4, False), (6, False)]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_step_without_any_label_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(config(folder / "run"))
    next_step = trainer.data.batches.next_step

    def without_labels() -> Any:
        batches = next_step()
        for batch in batches if trainer.counters.step == 3 else ():
            batch.labels.fill_(-100)
        return batches

    monkeypatch.setattr(trainer.data.batches, "next_step", without_labels)
    trainer.fit(until=2)
    before = {name: tensor.clone() for name, tensor in trainer.recovery.tensors().items()}
    trainer.fit(until=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.recovery.tensors().items())
    trainer.fit()
    trainer.close()
    assert "step 3 skipped: no label counts in its whole batch" in capsys.readouterr().out
    assert [line["valid_labels"] for line in logged(folder / "run")] == [32, 64, 64, 96, 128, 160]
    assert losses(folder / "run")[3] == 0.0


def test_a_fresh_start_sets_the_earlier_run_aside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = {"checkpoint__enable": True, "checkpoint__interval": 3, "metrics__enable_tensorboard": "true"}
    run(folder / "run", **saving)
    first = (folder / "run" / "metrics.jsonl").read_bytes()
    (folder / "run" / "checkpoint" / "notes").mkdir()
    (folder / "run" / "mine.txt").write_text("keep")
    capsys.readouterr()
    run(folder / "run", training__seed=1, **saving)
    aside = folder / "run" / "previous-1"
    assert f"an earlier run in {folder}/run was moved to {aside}" in capsys.readouterr().out
    assert (aside / "metrics.jsonl").read_bytes() == first != (folder / "run" / "metrics.jsonl").read_bytes()
    assert sorted(entry.name for entry in aside.iterdir()) == [
        "checkpoint",
        "config.toml",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert sorted(entry.name for entry in (aside / "checkpoint").iterdir()) == ["step-3", "step-6"]
    assert sorted(entry.name for entry in (folder / "run" / "checkpoint").iterdir()) == ["notes", "step-3", "step-6"]
    assert (folder / "run" / "mine.txt").read_text() == "keep"
    run(folder / "run", **saving)
    aside.rename(folder / "run" / "previous-3")
    run(folder / "run", **saving)
    names = sorted(entry.name for entry in (folder / "run").glob("previous-*"))
    assert names == ["previous-1", "previous-2", "previous-3"]


def test_what_was_set_aside_can_go_on_where_it_lies(folder: Path) -> None:
    saving = {
        "checkpoint__enable": True,
        "checkpoint__interval": 3,
        "training__steps": 9,
        "data__train": folder / "train",
    }
    run(folder / "straight", **saving)
    run(folder / "run", until=6, **saving)
    run(folder / "run", until=1, **saving)
    run(folder / "run" / "previous-1", checkpoint__resume="auto", **saving)
    assert losses(folder / "run" / "previous-1") == losses(folder / "straight")


def test_checkpoints_beside_the_metrics_or_far_away(folder: Path) -> None:
    for place in (".", folder / "elsewhere"):
        saving = {"checkpoint__enable": True, "checkpoint__interval": 3, "checkpoint__folder": place}
        for _ in range(2):
            run(folder / "run", **saving)
    aside = sorted(path.name for path in (folder / "run" / "previous-3" / "checkpoint").iterdir())
    assert aside == ["step-3", "step-6"]


def test_initial_weights_depend_on_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(17)  # the global generator has no say
    first = initial_weights(folder / "one")
    second = initial_weights(folder / "two", training__local_batch_size=1, optimizer__lr=0.5)
    other = initial_weights(folder / "three", training__seed=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name in first if not name.endswith("norm.weight")]
    assert len(drawn) == 2 + 2 * 7 and not any(torch.equal(first[name], other[name]) for name in drawn)
    assert len({first[name].flatten()[0].item() for name in drawn}) == len(drawn)  # no two alike


def test_gradients_are_clipped_and_the_schedule_scales_the_step(folder: Path) -> None:
    # Plain SGD moves the weights by lr x clipped gradient; in the first of two warm-up steps lr is half of the peak.
    sgd = {
        "optimizer__name": "sgd", "optimizer__lr": 1.0, "optimizer__weight_decay": 0.0, "training__max_norm": 0.125,
        "lr_schedule__warmup_steps": 2,
    }  # fmt: skip
    before = initial_weights(folder / "before")
    trainer = run(folder / "run", until=1, **sgd)
    moved = [parameter.detach() - before[name] for name, parameter in trainer.model.named_parameters()]
    assert math.sqrt(sum(float(d.double().square().sum()) for d in moved)) == pytest.approx(0.0625, rel=1e-5)
    assert logged(folder / "run")[0]["grad_norm"] > 0.5
