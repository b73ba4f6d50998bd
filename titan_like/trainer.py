"""Trainer: builds the components of a run from its config, runs the loop, closes them."""

import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titan_like.auto import with_chosen_recompute
from titan_like.config import Config
from titan_like.config.checks import device_checks
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.training import TrainingData
from titan_like.device import find_device, memory_gib, peak_flops
from titan_like.models.flavors import flops_per_token, resolve
from titan_like.observe.logs import setup_logging
from titan_like.observe.metrics import MetricsWriter, ProgressBar, Stopwatch, console_line, duration
from titan_like.observe.profiling import Profiler
from titan_like.observe.sample_ids import SampleIdLog
from titan_like.optim.optimizer import build_optimizer, lr_factor, set_lr
from titan_like.parallel.apply import build_model
from titan_like.parallel.compile import compiled_so_far, compiler_checks
from titan_like.parallel.distributed import close_process_group, init_process_group, set_timeout
from titan_like.parallel.mesh import build_mesh
from titan_like.quantize.float8 import hardware_checks
from titan_like.recovery import Recovery
from titan_like.step import StepResult, evaluation_step, read_results, training_step
from titan_like.stop import StopRequest

if TYPE_CHECKING:
    from estimation.types import MemoryReport

logger = logging.getLogger(__name__)


class NonFiniteError(TitanError):
    """A gradient was not finite, and training.skip_nonfinite is off."""


class Trainer:
    """One run on this rank. Its counters are those of the whole run, the same on every rank."""

    def __init__(self, config: Config) -> None:
        self.device = find_device(config.comm.backend)
        if problems := device_problems(config, self.device):
            raise ConfigError(*problems)
        init_process_group(self.device, config.comm.init_timeout_seconds)
        setup_logging(dist.get_rank())
        self.config = config = with_chosen_recompute(config, self.device)
        _seed_everything(config.training.seed, config.training.deterministic)
        self.forecast = forecast_memory(config, self.device)

        mesh = build_mesh(self.device.type, config.parallelism)
        model_config = resolve(config.model.name, config.model.flavor, config.model.overrides)
        self.model = build_model(model_config, config, mesh, self.device)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        readers = mesh.degree("dp_replicate", "dp_shard")
        self.data = TrainingData(config, mesh.batch_rank, readers, self.device, model_config.vocab_size)
        self.recovery = Recovery(config, self.model, self.optimizer, self.data)

        self.counters = self.recovery.resume()
        self.stopped = False  # by a signal or the time limit, before the end
        self._unread: list[Tensor] = []  # results of the last steps, still on the device
        self.metrics: MetricsWriter | None = None
        self.sample_ids: SampleIdLog | None = None
        try:
            self._open_logs(mesh.batch_rank, readers)
        except OSError as error:
            raise ConfigError(
                f'job.dump_folder is "{config.job.dump_folder}", but it cannot be written '
                f"({error.strerror or error}); make room there or choose another folder"
            ) from error
        dist.barrier()  # nobody goes on before the run folder is there

    def _open_logs(self, batch_rank: int, readers: int) -> None:
        folder, step, settings = self.recovery.run_folder, self.counters.step, self.config.metrics
        writes = dist.get_rank() == 0
        if writes:
            self.recovery.prepare_run_folder(step)
            self.metrics = MetricsWriter(folder, start_step=step, enable_tensorboard=settings.enable_tensorboard)
        if settings.log_sample_ids:
            self.sample_ids = SampleIdLog(
                batch_rank, readers, self.device, folder=folder if writes else None, start_step=step
            )

    def fit(self, until: int | None = None) -> None:
        """Train up to the step `until` (default: training.steps, which also shapes the schedule)."""
        settings, counters = self.config, self.counters
        total, left = settings.training.steps, self.data.batches.steps_left
        last = total if left is None else min(total, counters.step + left)
        end = last if until is None else min(until, last)
        self._stopwatch, self._last_logged = Stopwatch(), counters.step
        bar = ProgressBar(total, settings.metrics.progress_bar and dist.get_rank() == 0)
        first = counters.step + 1
        shown = ""
        with (
            StopRequest(settings.checkpoint.stop_after_seconds) as stop,
            _garbage_collected_by_hand() as collect_garbage,
            Profiler(settings.profiling, self.recovery.run_folder, self.device, dist.get_rank(), first) as profiler,
        ):
            while counters.step < end and not self.stopped:
                counters.step += 1
                step = counters.step
                stop.vote()
                lr = settings.optimizer.lr * lr_factor(step, total, settings.lr_schedule)
                self._train_one_step(lr)
                if step % settings.training.gc_freq == 0:
                    collect_garbage()
                if step == first + 1 and self.forecast is not None:
                    self._compare_forecast(self.forecast)
                if step == first:
                    set_timeout(settings.comm.train_timeout_seconds)
                    if settings.compile.enable:
                        logger.info("compiled %d graphs in %.1f s", *compiled_so_far())
                self.stopped = stop.agreed() and step < last
                must_save = self.stopped or step == last
                logs = step % settings.metrics.log_freq == 0 or step in (first, last)
                validates = self.data.validates and (step % settings.validation.interval == 0 or step == last)
                saves = self.recovery.is_due(step) or must_save
                bar.clear()
                if logs or validates or saves or step == end:
                    result = self._read_results()
                    shown = f"loss {result.loss:.3f}"
                if logs:
                    self._log(result, lr)
                if validates:
                    self._validate()
                if saves:
                    started = time.perf_counter()
                    self.recovery.save(counters, must=must_save)
                    self._stopwatch.leave_out(time.perf_counter() - started)
                bar.draw(step, shown)
                profiler.end_step()
            bar.clear()
            self.recovery.wait()
        if self.stopped:
            reason = stop.reason or "another rank asked"
            logger.info("stopped after step %d of %d (%s)", counters.step, total, reason)
        if counters.step == last:
            self.recovery.export(counters.step)
            self.data.log_read()
            folder = self.recovery.run_folder
            logger.info("finished: step %d of %d; everything lies in %s", counters.step, total, folder)

    def close(self) -> None:
        """Release what the run holds; its files are complete after this."""
        self.data.batches.close()
        if self.sample_ids is not None:
            self.sample_ids.close()
        if self.metrics is not None:
            self.metrics.close()
        close_process_group()

    def _train_one_step(self, lr: float) -> None:
        """Hand one step to the device; it does not wait for it."""
        waiting_since = time.perf_counter()
        with record_function("data"):
            batches = self.data.batches.next_step()
        self._stopwatch.add_wait(time.perf_counter() - waiting_since)
        if self.sample_ids is not None:
            self.sample_ids.write(self.counters.step, self.data.batches.last_ids)
        set_lr(self.optimizer, lr)
        self._unread.append(training_step(self.model, self.optimizer, batches, self.config.training.max_norm))
        self.counters.processed_positions += self.data.global_batch_size * self.config.training.seq_len

    def _read_results(self) -> StepResult:
        """Wait for the device, look at the results of all steps since the last reading, and return the latest.

        Raises:
            NonFiniteError: unless such steps are to be skipped.
        """
        results = read_results(self._unread)
        first = self.counters.step - len(results) + 1
        self._unread.clear()
        for step, result in enumerate(results, start=first):
            self.counters.valid_labels += result.valid_labels
            if result.applied:
                continue
            if result.valid_labels == 0:
                logger.warning("step %d skipped: no label counts in its whole batch", step)
                continue
            message = f"the gradient of step {step} is not finite (loss {result.loss}, norm {result.grad_norm})"
            if not self.config.training.skip_nonfinite:
                raise NonFiniteError(f"{message}; set training.skip_nonfinite to go on without such steps")
            logger.warning("step %d skipped: %s", step, message)
        return results[-1]

    def _compare_forecast(self, forecast: "MemoryReport") -> None:
        """After the second step, when all states exist: a wrong forecast should be seen, and reported."""
        measured = memory_gib(self.device, reset=False)
        if "active" in measured:  # a CPU process's resident set holds much besides tensors
            logger.info(
                "memory: %.2f GiB active, %.2f GiB reserved; the forecast for the fullest rank was %.2f and %.2f",
                measured["active"], measured["reserved"], forecast.peak_bytes / 2**30, forecast.reserved_bytes / 2**30,
            )  # fmt: skip

    def _log(self, result: StepResult, lr: float) -> None:
        steps = self.counters.step - self._last_logged
        self._last_logged = self.counters.step
        seconds, waited = self._stopwatch.read()
        tokens = steps * self.data.global_batch_size * self.config.training.seq_len
        tokens_per_s = tokens / seconds / dist.get_world_size()
        peak = peak_flops(self.device)
        flops = flops_per_token(self.model.config, self.config.training.seq_len) * tokens_per_s
        values: dict[str, Any] = {
            "step": self.counters.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "processed_positions": self.counters.processed_positions,
            "valid_labels": self.counters.valid_labels,
            "tokens_per_s": tokens_per_s,
            "mfu": flops / peak if peak else None,
            "data_wait": waited / seconds,
            **{f"memory_gib/{key}": value for key, value in memory_gib(self.device).items()},
        }
        seconds_left = seconds / steps * (self.config.training.steps - self.counters.step)
        logger.info(console_line(values, self.config.training.steps, seconds_left))
        if self.metrics is not None:
            self.metrics.write(values)

    def _validate(self) -> None:
        step, started = self.counters.step, time.perf_counter()
        with record_function("validation"):
            loss, labels = evaluation_step(self.model, self.data.validation_batches())
        seconds = time.perf_counter() - started
        logger.info("validation at step %d: loss %.4f over %s labels, %s", step, loss, f"{labels:,}", duration(seconds))
        if self.metrics is not None:
            self.metrics.write({"step": step, "validation_loss": loss, "validation_labels": labels})
        self._stopwatch.leave_out(seconds)  # validation is not part of the step time


def device_problems(config: Config, device: torch.device) -> list[str]:
    """What `config` asks for and `device` cannot do: what the launcher, which has no torch, could not know for sure."""
    problems = compiler_checks(device) if config.compile.enable else []
    if device.type == "cuda":
        return problems + hardware_checks(device, config.float8)
    return problems + device_checks(config, "this run's device is the CPU")


def forecast_memory(config: Config, device: torch.device) -> "MemoryReport | None":
    """What the fullest rank will hold; None without a forecast.

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


@contextmanager
def _garbage_collected_by_hand() -> Iterator[Callable[[], int]]:
    """Python looks for garbage when it is called, at the same step on every rank: else each rank pauses at a moment of
    its own, and all the others wait for it. What exists already is left out, which makes a look cheap."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
