"""Trainer: builds the components of a run from its config, runs the loop, closes them."""

import logging
import random
import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_like import __version__
from titan_like.checkpoint import manager as checkpoint
from titan_like.config import Config, dump_toml
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.dataset import TokenDataset
from titan_like.data.loader import BatchSource, evaluation_batches
from titan_like.device import find_device, memory_gib, peak_flops
from titan_like.models.flavors import flops_per_token, resolve
from titan_like.observe.logs import setup_logging
from titan_like.observe.metrics import MetricsWriter, ProgressBar, Stopwatch, console_line, duration
from titan_like.optim.optimizer import build_optimizer, lr_factor, set_lr
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group, set_timeout
from titan_like.parallel.mesh import build_mesh
from titan_like.step import StepResult, evaluation_step, training_step

logger = logging.getLogger(__name__)
OWN_ENTRIES = ("tensorboard", "metrics.jsonl", "config.toml")  # of a run folder, beside the checkpoints


class NonFiniteError(TitanError):
    """A gradient was not finite, and training.skip_nonfinite is off."""


class Trainer:
    """One run on this rank. Counters are those of the whole run, the same on every rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = find_device(config.comm.backend)
        init_process_group(self.device, config.comm.init_timeout_seconds)
        setup_logging(dist.get_rank())
        _seed_everything(config.training.seed, config.training.deterministic)

        self.mesh = build_mesh(self.device.type, config.parallelism)
        self.model_config = resolve(config.model.name, config.model.flavor, config.model.overrides)
        self.model = build_model(self.model_config, config, self.mesh, self.device)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        checkpoint.create_optimizer_state(self.optimizer)
        self._build_data()

        self.step = 0
        self.processed_positions = 0
        self.valid_labels = 0
        self.run_folder = Path(config.job.dump_folder)
        self.checkpoint_folder = self.run_folder / config.checkpoint.folder
        self._resume()
        self.metrics = self._open_run_folder() if dist.get_rank() == 0 else None
        dist.barrier()  # nobody goes on before the run folder is there

    def _build_data(self) -> None:
        data, training = self.config.data, self.config.training
        self.readers = self.mesh.degree("dp_replicate", "dp_shard")
        self.resets = {
            "reset_attention_mask": data.reset_attention_mask,
            "reset_position_ids": data.reset_position_ids,
        }
        documents = any(self.resets.values())
        self.dataset = TokenDataset(data.train, training.seq_len, data.seed, documents=documents)
        self.global_batch_size = training.global_batch_size
        if self.global_batch_size == -1:
            self.global_batch_size = training.local_batch_size * self.readers
        self.batches = BatchSource(
            self.dataset,
            local_batch_size=training.local_batch_size,
            global_batch_size=self.global_batch_size,
            dp_rank=self.mesh.batch_rank,
            dp_size=self.readers,
            num_workers=data.num_workers,
            device=self.device,
            **self.resets,
        )
        self.validates = bool(self.config.validation.interval and data.validation)
        if self.validates:
            self.validation_set = TokenDataset(
                data.validation, training.seq_len, data.seed, shuffle=False, documents=documents
            )
        for prefix, manifest in zip(data.train, self.dataset.manifests, strict=True):
            if manifest is not None:
                logger.info(
                    "data %s: %s documents, %s tokens; a model that only counts tokens would reach a loss of %.2f",
                    prefix, f"{manifest.documents:,}", f"{manifest.tokens:,}", manifest.unigram_entropy_nats,
                )  # fmt: skip

    def fit(self, until: int | None = None) -> None:
        """Train up to the step `until` (default: training.steps, which also shapes the schedule)."""
        total, settings = self.config.training.steps, self.config
        end = total if until is None else min(until, total)
        self._stopwatch, self._last_logged = Stopwatch(), self.step
        bar = ProgressBar(total, settings.metrics.progress_bar and dist.get_rank() == 0)
        first_step = self.step + 1
        while self.step < end:
            self.step += 1
            lr = settings.optimizer.lr * lr_factor(self.step, total, settings.lr_schedule)
            result = self._train_one_step(lr)
            if self.step == first_step:
                set_timeout(settings.comm.train_timeout_seconds)
            bar.clear()
            if self.step % settings.metrics.log_freq == 0 or self.step in (first_step, total):
                self._log(result, lr)
            if self.validates and (self.step % settings.validation.interval == 0 or self.step == total):
                self._validate()
            if settings.checkpoint.enable and (self.step % settings.checkpoint.interval == 0 or self.step == total):
                self._save()
            bar.draw(self.step, f"loss {result.loss:.3f}")
        bar.clear()
        if self.step == total:
            logger.info("finished: step %d of %d; everything lies in %s", self.step, total, self.run_folder)

    def close(self) -> None:
        """Release what the run holds; its files are complete after this."""
        self.batches.close()
        if self.metrics is not None:
            self.metrics.close()
        close_process_group()

    def _train_one_step(self, lr: float) -> StepResult:
        waiting_since = time.perf_counter()
        batches = self.batches.next_step()
        self._stopwatch.add_wait(time.perf_counter() - waiting_since)
        set_lr(self.optimizer, lr)
        result = training_step(self.model, self.optimizer, batches, self.config.training.max_norm)
        self.processed_positions += self.global_batch_size * self.config.training.seq_len
        self.valid_labels += result.valid_labels
        if not result.applied and result.valid_labels == 0:
            logger.warning("step %d skipped: no label counts in its whole batch", self.step)
        elif not result.applied:
            message = f"the gradient of step {self.step} is not finite (loss {result.loss}, norm {result.grad_norm})"
            if not self.config.training.skip_nonfinite:
                raise NonFiniteError(f"{message}; set training.skip_nonfinite to go on without such steps")
            logger.warning("step %d skipped: %s", self.step, message)
        return result

    def _log(self, result: StepResult, lr: float) -> None:
        steps = self.step - self._last_logged
        self._last_logged = self.step
        seconds, waited = self._stopwatch.read()
        tokens_per_s = steps * self.global_batch_size * self.config.training.seq_len / seconds / dist.get_world_size()
        peak = peak_flops(self.device)
        flops = flops_per_token(self.model_config, self.config.training.seq_len) * tokens_per_s
        values: dict[str, Any] = {
            "step": self.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "processed_positions": self.processed_positions,
            "valid_labels": self.valid_labels,
            "tokens_per_s": tokens_per_s,
            "mfu": flops / peak if peak else None,
            "data_wait": waited / seconds,
            **{f"memory_gib/{key}": value for key, value in memory_gib(self.device).items()},
        }
        seconds_left = seconds / steps * (self.config.training.steps - self.step)
        logger.info(console_line(values, self.config.training.steps, seconds_left))
        if self.metrics is not None:
            self.metrics.write(values)

    def _validate(self) -> None:
        started = time.perf_counter()
        batches = evaluation_batches(
            self.validation_set,
            self.config.validation.samples,
            self.config.training.local_batch_size,
            self.mesh.batch_rank,
            self.readers,
            device=self.device,
            **self.resets,
        )
        loss, labels = evaluation_step(self.model, batches)
        seconds = time.perf_counter() - started
        shown = duration(seconds)
        logger.info("validation at step %d: loss %.4f over %s labels, %s", self.step, loss, f"{labels:,}", shown)
        if self.metrics is not None:
            self.metrics.write({"step": self.step, "validation_loss": loss, "validation_labels": labels})
        self._stopwatch.leave_out(seconds)  # validation is not part of the step time

    def _save(self) -> None:
        started = time.perf_counter()
        record = {
            "titan_like": __version__,
            "torch": torch.__version__,
            "counters": {"processed_positions": self.processed_positions, "valid_labels": self.valid_labels},
            "data": {**self.batches.state_dict(), "identity": self._data_identity()},
            "model": self.model_config.model_dump(),
            "tokenizer": self._tokenizer_path(),
        }
        checkpoint.save(self.checkpoint_folder, self.step, self._tensors(), record, dump_toml(self.config))
        if dist.get_rank() == 0:
            checkpoint.keep_latest(self.checkpoint_folder, self.config.checkpoint.keep_latest_k)
        seconds = time.perf_counter() - started
        path = self.checkpoint_folder / f"step-{self.step}"
        logger.info("checkpoint of step %d in %s, %s", self.step, path, duration(seconds))
        self._stopwatch.leave_out(seconds)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**checkpoint.model_tensors(self.model), **checkpoint.optimizer_tensors(self.model, self.optimizer)}

    def _data_identity(self) -> dict[str, Any]:
        """All that decides which tokens a position in the data stands for."""
        settings = self.config
        return {
            "data.train": self.dataset.fingerprint,
            "data.seed": settings.data.seed,
            "training.seq_len": settings.training.seq_len,
        }

    def _tokenizer_path(self) -> str | None:
        if self.config.model.tokenizer_path:
            return str(Path(self.config.model.tokenizer_path).absolute())
        manifest = self.dataset.manifests[0]
        return str(manifest.tokenizer_path(self.config.data.train[0]).absolute()) if manifest else None

    def _resume(self) -> None:
        folder, settings = self.checkpoint_folder, self.config.checkpoint
        step = checkpoint.step_to_resume(folder, settings.resume)
        if step is None:
            if settings.resume == "auto":
                logger.info("no checkpoint in %s: starting from step 0", folder)
            return
        record = checkpoint.read_record(folder, step)
        _check_same_model(record["model"], self.model_config.model_dump(), folder / f"step-{step}")
        saved = record["data"]["identity"]
        if differing := [key for key, value in self._data_identity().items() if saved[key] != value]:
            raise ConfigError(
                f"{folder}/step-{step} was trained on other data ({', '.join(differing)} changed): its position means "
                "nothing here; set the data as they were, or start anew in another job.dump_folder"
            )
        checkpoint.load(folder, step, self._tensors(), rng=True)
        self.batches.load_state_dict(record["data"])
        self.step = step
        self.processed_positions = record["counters"]["processed_positions"]
        self.valid_labels = record["counters"]["valid_labels"]
        logger.info("resumed from %s", folder / f"step-{step}")
        if step >= self.config.training.steps:
            logger.info("nothing to do: raise training.steps (%d) to go on", self.config.training.steps)

    def _open_run_folder(self) -> MetricsWriter:
        _set_aside(self.run_folder, self.checkpoint_folder, self.step)
        self.run_folder.mkdir(parents=True, exist_ok=True)
        (self.run_folder / "config.toml").write_text(dump_toml(self.config))
        return MetricsWriter(
            self.run_folder, start_step=self.step, enable_tensorboard=self.config.metrics.enable_tensorboard
        )


def _seed_everything(seed: int, deterministic: bool) -> None:
    """Nothing in the step draws random numbers; this is for what users add to it."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)


def _check_same_model(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    differing = [f"{key} is {saved.get(key)}, not {wanted[key]}" for key in wanted if saved.get(key) != wanted[key]]
    if differing:
        raise ConfigError(
            f"{path} holds another model ({'; '.join(differing)}); set the model as it was, "
            "or start anew with checkpoint.resume never"
        )


def _set_aside(run_folder: Path, checkpoint_folder: Path, step: int) -> None:
    """Move what a run that goes on after `step` would write over into <run folder>/previous-<n>: nothing is lost."""
    checkpoints = [f"step-{later}" for later in checkpoint.list_steps(checkpoint_folder) if later > step]
    starts_over = step == 0 and (bool(checkpoints) or (run_folder / "metrics.jsonl").exists())
    if not checkpoints and not starts_over:
        return
    aside = next(path for n in count(1) if not (path := run_folder / f"previous-{n}").exists())
    (aside / "checkpoint").mkdir(parents=True)
    for name in checkpoints:
        shutil.move(str(checkpoint_folder / name), str(aside / "checkpoint" / name))
    for name in OWN_ENTRIES if starts_over else ():
        if (run_folder / name).exists():
            shutil.move(str(run_folder / name), str(aside / name))
    if starts_over:
        logger.warning(
            "an earlier run in %s was moved to %s; --checkpoint.resume auto would go on with it", run_folder, aside
        )
    else:
        logger.warning("the checkpoints after step %d were moved to %s", step, aside)
