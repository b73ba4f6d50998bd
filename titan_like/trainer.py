"""Trainer: builds the components of a run from its config, runs the loop, closes them."""

import logging
import platform
import random
import shutil
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from titan_like import __version__
from titan_like.checkpoint import commit, hf
from titan_like.checkpoint import manager as checkpoint
from titan_like.checkpoint.changes import changed_settings, require_allowed, saved_settings
from titan_like.checkpoint.restart import launch_id, resume_of_attempt
from titan_like.checkpoint.saver import Saver
from titan_like.config import Config, dump_toml
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.dataset import TokenDataset, open_training_data
from titan_like.data.hf_tokenizer import export_tokenizer, token_ids, twin
from titan_like.data.loader import BatchSource, evaluation_batches
from titan_like.data.manifest import file_sha256
from titan_like.device import find_device, memory_gib, peak_flops
from titan_like.models.flavors import flops_per_token, resolve
from titan_like.models.hf_format import check_start
from titan_like.observe.logs import setup_logging
from titan_like.observe.metrics import MetricsWriter, ProgressBar, Stopwatch, console_line, duration
from titan_like.observe.sample_ids import SampleIdLog
from titan_like.optim.optimizer import build_optimizer, lr_factor, set_lr
from titan_like.parallel.apply import build_model
from titan_like.parallel.distributed import close_process_group, init_process_group, new_cpu_group, set_timeout
from titan_like.parallel.init import local_ranges
from titan_like.parallel.mesh import AXES, build_mesh
from titan_like.step import StepResult, evaluation_step, training_step
from titan_like.stop import StopRequest

if TYPE_CHECKING:
    from estimation.types import MemoryReport

logger = logging.getLogger(__name__)
WRITE_TIMEOUT_SECONDS = 3600  # of one rank writing its part of a checkpoint; a dead one is noticed at once
OWN_ENTRIES = ("tensorboard", "metrics.jsonl", "sample_ids.jsonl", "config.toml")  # beside the checkpoints


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
        self.forecast = forecast_memory(config, self.device)

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
        self.saver = None
        if config.checkpoint.enable:
            group = new_cpu_group(config.comm.init_timeout_seconds, WRITE_TIMEOUT_SECONDS)
            self.saver = Saver(self.checkpoint_folder, config.checkpoint, group)
        self.stopped = False  # by a signal or the time limit, before the end
        export_hf = config.checkpoint.export_hf
        self.export = hf.Export(self.run_folder / export_hf, self.model_config) if export_hf else None
        self._resume()
        if config.model.hf_path and self.step == 0:
            self._start_from_hf(Path(config.model.hf_path))
        elif config.model.hf_path:
            logger.warning("model.hf_path %s is ignored: step %d is here", config.model.hf_path, self.step)
        self.metrics = self._open_run_folder() if dist.get_rank() == 0 else None
        self.sample_ids = self._open_sample_ids() if config.metrics.log_sample_ids else None
        dist.barrier()  # nobody goes on before the run folder is there

    def _build_data(self) -> None:
        data, training = self.config.data, self.config.training
        self.readers = self.mesh.degree("dp_replicate", "dp_shard")
        self.resets = {
            "reset_attention_mask": data.reset_attention_mask,
            "reset_position_ids": data.reset_position_ids,
            "eod_mask_loss": data.eod_mask_loss,
        }
        documents, stop = any(self.resets.values()), data.on_exhausted == "stop"
        self.dataset = open_training_data(
            data.train_entries, data.train_weights, training.seq_len, data.seed, documents=documents, repeat=not stop
        )
        self.global_batch_size = training.global_batch_size
        if self.global_batch_size == -1:
            self.global_batch_size = training.local_batch_size * self.readers
        self.batches = BatchSource(
            self.dataset,
            local_batch_size=training.local_batch_size,
            global_batch_size=self.global_batch_size,
            dp_rank=self.mesh.batch_rank,
            dp_size=self.readers,
            stop=stop,
            num_workers=data.num_workers,
            device=self.device,
            **self.resets,
        )
        self.validates = bool(self.config.validation.interval and data.validation)
        if self.validates:
            self.validation_set = TokenDataset(
                data.validation, training.seq_len, data.seed, shuffle=False, documents=documents
            )
        logger.info("training data: %s", self.dataset.summary)
        for prefix, manifest in zip(self.dataset.prefixes, self.dataset.manifests, strict=True):
            if manifest is not None:
                logger.info(
                    "data %s: %s documents, %s tokens; a model that only counts tokens would reach a loss of %.2f",
                    prefix, f"{manifest.documents:,}", f"{manifest.tokens:,}", manifest.unigram_entropy_nats,
                )  # fmt: skip

    def fit(self, until: int | None = None) -> None:
        """Train up to the step `until` (default: training.steps, which also shapes the schedule)."""
        total, settings = self.config.training.steps, self.config
        left = self.batches.steps_left
        last = total if left is None else min(total, self.step + left)
        end = last if until is None else min(until, last)
        self._stopwatch, self._last_logged = Stopwatch(), self.step
        bar = ProgressBar(total, settings.metrics.progress_bar and dist.get_rank() == 0)
        first_step = self.step + 1
        with StopRequest(settings.checkpoint.stop_after_seconds) as stop:
            while self.step < end and not self.stopped:
                self.step += 1
                stop.vote()
                lr = settings.optimizer.lr * lr_factor(self.step, total, settings.lr_schedule)
                result = self._train_one_step(lr)
                if self.step == first_step + 1 and self.forecast is not None:
                    self._compare_forecast(self.forecast)
                if self.step == first_step:
                    set_timeout(settings.comm.train_timeout_seconds)
                bar.clear()
                if self.step % settings.metrics.log_freq == 0 or self.step in (first_step, last):
                    self._log(result, lr)
                if self.validates and (self.step % settings.validation.interval == 0 or self.step == last):
                    self._validate()
                self.stopped = stop.agreed() and self.step < last
                self._save_if_due(must=self.stopped or self.step == last)
                bar.draw(self.step, f"loss {result.loss:.3f}")
            bar.clear()
            if self.saver is not None:
                self.saver.wait()
        if self.stopped:
            logger.info("stopped after step %d of %d (%s)", self.step, total, stop.reason or "another rank asked")
        if self.step == last:
            if self.export is not None:
                self._export_hf(self.export)
            self._log_data_read()
            logger.info("finished: step %d of %d; everything lies in %s", self.step, total, self.run_folder)

    def close(self) -> None:
        """Release what the run holds; its files are complete after this."""
        self.batches.close()
        if self.sample_ids is not None:
            self.sample_ids.close()
        if self.metrics is not None:
            self.metrics.close()
        close_process_group()

    def _train_one_step(self, lr: float) -> StepResult:
        waiting_since = time.perf_counter()
        batches = self.batches.next_step()
        self._stopwatch.add_wait(time.perf_counter() - waiting_since)
        if self.sample_ids is not None:
            self.sample_ids.write(self.step, self.batches.last_ids)
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

    def _compare_forecast(self, forecast: "MemoryReport") -> None:
        """After the second step, when all states exist: a wrong forecast should be seen, and reported."""
        measured = memory_gib(self.device, reset=False)
        if "active" in measured:  # a CPU process's resident set holds much besides tensors
            logger.info(
                "memory: %.2f GiB active, %.2f GiB reserved; the forecast for the fullest rank was %.2f and %.2f",
                measured["active"], measured["reserved"], forecast.peak_bytes / 2**30, forecast.reserved_bytes / 2**30,
            )  # fmt: skip

    def _log_data_read(self) -> None:
        """How far the data were read, set by set, and what the end of the data has left unused."""
        for name, epochs in self.dataset.epochs(self.batches.consumed).items():
            logger.info("data %s: read %.2f times", name, epochs)
        left = self.batches.samples_left
        if left is not None and left < self.global_batch_size:
            logger.info(
                "the data are exhausted (data.on_exhausted stop): %d of %d samples unused, fewer than one step's %d",
                left, self.batches.samples, self.global_batch_size,
            )  # fmt: skip

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

    def _save_if_due(self, *, must: bool) -> None:
        """At the interval, and where it `must` be and succeed: at the last step and before a stop."""
        if self.saver is None:
            return
        self.saver.check()
        if not must and self.step % self.config.checkpoint.interval:
            return
        started = time.perf_counter()
        self.saver.save(self.step, self._tensors(), self._record(), dump_toml(self.config), must=must)
        self._stopwatch.leave_out(time.perf_counter() - started)

    def _record(self) -> dict[str, Any]:
        """What record.json says of this step, beside its number."""
        tokenizer = self._tokenizer_path()
        shards = zip(self.dataset.prefixes, self.dataset.manifests, strict=True)
        return {
            "counters": {"processed_positions": self.processed_positions, "valid_labels": self.valid_labels},
            "data": {
                **self.batches.state_dict(),
                "step_samples": self.global_batch_size,
                "identity": self._data_identity(),
            },
            "shards": {
                str(prefix): manifest and {"bin_sha256": manifest.bin_sha256, "idx_sha256": manifest.idx_sha256}
                for prefix, manifest in shards
            },
            "model": self.model_config.model_dump(),
            "tokenizer": tokenizer,
            "tokenizer_sha256": file_sha256(tokenizer) if tokenizer and Path(tokenizer).is_file() else None,
            "mesh": {"ranks": dist.get_world_size(), **{axis: self.mesh.degree(axis) for axis in AXES}},
            "versions": {"titan_like": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "command": sys.argv,
            "launch": launch_id(),
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

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
        return str(manifest.tokenizer_path(self.dataset.prefixes[0]).absolute()) if manifest else None

    def _resume(self) -> None:
        folder, settings = self.checkpoint_folder, self.config.checkpoint
        if not settings.enable:
            return
        if dist.get_rank() == 0:
            commit.remove_leftovers(folder)
        resume = resume_of_attempt(folder, settings.resume)
        step = checkpoint.choose_step(folder, resume, verify=settings.verify)
        if step is None:
            if resume == "auto":
                logger.info("no checkpoint in %s: starting from step 0", folder)
            return
        path = commit.step_folder(folder, step)
        record = checkpoint.read_record(folder, step)
        if "imported_from" in record:
            raise ConfigError(
                f"{path} holds weights only, imported from {record['imported_from']}; "
                "start from them with model.hf_path in another job.dump_folder"
            )
        _check_same_model(record["model"], self.model_config.model_dump(), path)
        same_data = self._check_changes(path, record["data"]["identity"])
        checkpoint.load(folder, step, self._tensors(), rng=True, verify=False)  # choose_step has
        checkpoint.copy_tied(self.model, self.optimizer)
        if same_data:
            self.batches.load_state_dict(record["data"])
        if (samples := record["data"].get("step_samples")) != self.global_batch_size:
            logger.warning(
                "samples per step change from %s to %d; the data go on at sample %d",
                samples, self.global_batch_size, self.batches.consumed,
            )  # fmt: skip
        self.step = step
        self.processed_positions = record["counters"]["processed_positions"]
        self.valid_labels = record["counters"]["valid_labels"]
        logger.info("resumed from %s", path)
        if (ranks := record["mesh"]["ranks"]) != dist.get_world_size():
            logger.info("it was saved by %d ranks, %d go on", ranks, dist.get_world_size())
        if step >= self.config.training.steps:
            logger.info("nothing to do: raise training.steps (%d) to go on", self.config.training.steps)

    def _start_from_hf(self, folder: Path) -> None:
        if problems := check_start(folder, self.model_config):
            raise ConfigError(*problems)
        hf.load_weights(hf.Weights(folder), self.model.named_parameters(), local_ranges)
        logger.info("starting from the weights in %s", folder)

    def _export_hf(self, export: hf.Export) -> None:
        """Collective: every rank reads its share from the last checkpoint, whatever the mesh."""
        export.write(commit.step_folder(self.checkpoint_folder, self.step), dist.get_rank(), dist.get_world_size())
        dist.barrier()
        if dist.get_rank() == 0:
            path, start = self._tokenizer_path(), self.config.model.hf_path
            tokenizer = Path(path) if path else None
            if tokenizer is not None and start:
                tokenizer = twin(tokenizer, Path(start)) or tokenizer  # what lies beside it goes along
            export.finish(token_ids(tokenizer) if tokenizer else {})
            files = export_tokenizer(tokenizer, export.folder) if tokenizer else []
            logger.info("exported to %s with %s", export.folder, ", ".join(files) or "no tokenizer")
        dist.barrier()

    def _check_changes(self, path: Path, saved_identity: dict[str, Any]) -> bool:
        """Tell what differs from the saved config, refuse what must be allowed; whether the data are the same."""
        config, allowed = self.config, self.config.checkpoint.allow_changes
        changes = changed_settings(saved_settings(path), config.model_dump(), Config().model_dump())
        for key, (old, new) in changes.items():
            logger.info("changed since %s: %s was %s, is %s", path.name, key, old, new)
        require_allowed(path, changes, allowed)
        differing = [key for key, value in self._data_identity().items() if saved_identity[key] != value]
        if differing and not allowed:
            raise ConfigError(
                f"{path} was trained on other data ({', '.join(differing)} changed): its position means nothing here; "
                "set the data as they were, set checkpoint.allow_changes to begin these at their start, or start anew "
                "in another job.dump_folder"
            )
        if differing:
            logger.warning("other data than before (%s changed): they begin at their start", ", ".join(differing))
        return not differing

    def _open_run_folder(self) -> MetricsWriter:
        _set_aside(self.run_folder, self.checkpoint_folder, self.step)
        self.run_folder.mkdir(parents=True, exist_ok=True)
        (self.run_folder / "config.toml").write_text(dump_toml(self.config))
        return MetricsWriter(
            self.run_folder, start_step=self.step, enable_tensorboard=self.config.metrics.enable_tensorboard
        )

    def _open_sample_ids(self) -> SampleIdLog:
        folder = self.run_folder if dist.get_rank() == 0 else None
        return SampleIdLog(self.mesh.batch_rank, self.readers, self.device, folder=folder, start_step=self.step)


def forecast_memory(config: Config, device: torch.device) -> "MemoryReport | None":
    """What the fullest rank will hold; None without a forecast. The trainer's only call of the estimator.

    Raises:
        ConfigError: it does not fit and estimation.preflight is abort, or the device is unknown.
    """
    name = config.estimation.device
    if config.estimation.preflight == "off" or (device.type != "cuda" and not name):
        return None
    from estimation.devices import device_named
    from estimation.preflight import gpu_here, preflight

    described = device_named(name) if name else gpu_here(*_gpu_facts(device))
    return preflight(config, dist.get_world_size(), described)


def _gpu_facts(device: torch.device) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory


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
