"""Where a run goes on, and what it leaves behind: resume, checkpoints, the export, a run folder without mixtures."""

import logging
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from titan_like import __version__
from titan_like.checkpoint import commit, hf
from titan_like.checkpoint import manager as checkpoint
from titan_like.checkpoint.changes import changed_settings, require_allowed, saved_settings
from titan_like.checkpoint.restart import launch_id, resume_of_attempt
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.storage import Folder, locate, store_of
from titan_like.config import Config, dump_toml
from titan_like.config.errors import ConfigError
from titan_like.data.hf_tokenizer import export_tokenizer, token_ids, twin
from titan_like.data.training import TrainingData
from titan_like.models.hf_format import check_start
from titan_like.observe.appended import replace_text
from titan_like.parallel.distributed import new_cpu_group
from titan_like.parallel.init import local_ranges
from titan_like.parallel.mesh import AXES
from titan_like.parallel.model import ParallelModel

logger = logging.getLogger(__name__)
WRITE_TIMEOUT_SECONDS = 3600  # of one rank writing its part of a checkpoint; a dead one is noticed at once
OWN_ENTRIES = ("tensorboard", "metrics.jsonl", "sample_ids.jsonl", "config.toml")  # beside the checkpoints


@dataclass
class Counters:
    """Of the whole run, the same on every rank."""

    step: int = 0
    processed_positions: int = 0
    valid_labels: int = 0


class Recovery:
    """Checkpoints of a run. Collective: every rank makes the same calls in the same order."""

    def __init__(
        self, config: Config, model: ParallelModel, optimizer: torch.optim.Optimizer, data: TrainingData
    ) -> None:
        self._config, self._model, self._optimizer, self._data = config, model, optimizer, data
        checkpoint.create_optimizer_state(optimizer)
        self.run_folder = Path(config.job.dump_folder)
        self.folder = locate(config.checkpoint.folder, self.run_folder)
        self._saver = None
        if config.checkpoint.enable:
            group = new_cpu_group(config.comm.init_timeout_seconds, WRITE_TIMEOUT_SECONDS)
            self._saver = Saver(self.folder, config.checkpoint, group)
        export = config.checkpoint.export_hf
        self._export = hf.Export(self.run_folder / export, model.config) if export else None  # raises early

    def resume(self) -> Counters:
        """Load what checkpoint.resume asks for, else the weights that model.hf_path names.

        Raises:
            ConfigError: what is there does not fit this run.
        """
        counters = self._load() if self._config.checkpoint.enable else Counters()
        start = self._config.model.hf_path
        if start and counters.step == 0:
            self._start_from_hf(Path(start))
        elif start:
            logger.warning("model.hf_path %s is ignored: step %d is here", start, counters.step)
        return counters

    def prepare_run_folder(self, step: int) -> None:
        """On one rank: set aside what a run that goes on after `step` would write over, and save the config.

        Raises:
            OSError: the folder cannot be written.
        """
        _set_aside(self.run_folder, self.folder, step, saves=self._saver is not None)
        self.run_folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.run_folder / "config.toml", dump_toml(self._config))

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint of this step; raises what a save in the background has raised."""
        if self._saver is None:
            return False
        self._saver.check()
        return step % self._config.checkpoint.interval == 0

    def save(self, counters: Counters, *, must: bool) -> None:
        """Save; at the last step and before a stop it `must` succeed, whatever checkpoint.on_error says."""
        if self._saver is not None:
            config = dump_toml(self._config)
            with record_function("checkpoint"):
                self._saver.save(counters.step, self.tensors(), self._record(counters), config, must=must)

    def wait(self) -> None:
        """Until the last checkpoint is complete."""
        if self._saver is not None:
            self._saver.wait()

    def export(self, step: int) -> None:
        """The Hugging Face folder that checkpoint.export_hf names: every rank reads its share from the checkpoint of
        the last step, whatever the mesh."""
        if self._export is None:
            return
        self._export.write(commit.step_folder(self.folder, step), dist.get_rank(), dist.get_world_size())
        dist.barrier()
        if dist.get_rank() == 0:
            path, start = self._data.tokenizer_path(), self._config.model.hf_path
            tokenizer = Path(path) if path else None
            if tokenizer is not None and start:
                tokenizer = twin(tokenizer, Path(start)) or tokenizer  # what lies beside it goes along
            self._export.finish(token_ids(tokenizer) if tokenizer else {})
            files = export_tokenizer(tokenizer, self._export.folder) if tokenizer else []
            logger.info("exported to %s with %s", self._export.folder, ", ".join(files) or "no tokenizer")
        dist.barrier()

    def tensors(self) -> dict[str, torch.Tensor]:
        model, optimizer = self._model, self._optimizer
        return {**checkpoint.model_tensors(model), **checkpoint.optimizer_tensors(model, optimizer)}

    def _record(self, counters: Counters) -> dict[str, Any]:
        """What record.json says of this step, beside its number."""
        mesh = self._model.mesh
        return {
            "counters": {
                "processed_positions": counters.processed_positions,
                "valid_labels": counters.valid_labels,
            },
            **self._data.record(),
            "model": self._model.config.model_dump(),
            "mesh": {"ranks": dist.get_world_size(), **{axis: mesh.degree(axis) for axis in AXES}},
            "versions": {"titan_like": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "command": sys.argv,
            "launch": launch_id(),
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _load(self) -> Counters:
        folder, settings = self.folder, self._config.checkpoint
        if dist.get_rank() == 0:
            commit.remove_leftovers(folder)
        resume = resume_of_attempt(folder, settings.resume)
        step = checkpoint.choose_step(folder, resume, verify=settings.verify)
        if step is None:
            if resume == "auto":
                logger.info("no checkpoint in %s: starting from step 0", folder)
            return Counters()
        path = commit.step_folder(folder, step)
        record = checkpoint.read_record(folder, step)
        if "imported_from" in record:
            raise ConfigError(
                f"{path} holds weights only, imported from {record['imported_from']}; "
                "start from them with model.hf_path in another job.dump_folder"
            )
        _check_same_model(record["model"], self._model.config.model_dump(), path)
        same_data = self._check_changes(path, record["data"]["identity"])
        checkpoint.load(folder, step, self.tensors(), rng=True, verify=False)  # choose_step has
        checkpoint.copy_tied(self._model, self._optimizer)
        data = self._data
        if same_data:
            data.batches.load_state_dict(record["data"])
        if (samples := record["data"].get("step_samples")) != data.global_batch_size:
            logger.warning(
                "samples per step change from %s to %d; the data go on at sample %d",
                samples, data.global_batch_size, data.batches.consumed,
            )  # fmt: skip
        logger.info("resumed from %s", path)
        if (ranks := record["mesh"]["ranks"]) != dist.get_world_size():
            logger.info("it was saved by %d ranks, %d go on", ranks, dist.get_world_size())
        if step >= self._config.training.steps:
            logger.info("nothing to do: raise training.steps (%d) to go on", self._config.training.steps)
        return Counters(step, record["counters"]["processed_positions"], record["counters"]["valid_labels"])

    def _start_from_hf(self, folder: Path) -> None:
        if problems := check_start(folder, self._model.config):
            raise ConfigError(*problems)
        hf.load_weights(hf.Weights(folder), self._model.named_parameters(), local_ranges)
        logger.info("starting from the weights in %s", folder)

    def _check_changes(self, path: Folder, saved_identity: dict[str, Any]) -> bool:
        """Tell what differs from the saved config, refuse what must be allowed; whether the data are the same."""
        config, allowed = self._config, self._config.checkpoint.allow_changes
        changes = changed_settings(saved_settings(path), config.model_dump(), Config().model_dump())
        for key, (old, new) in changes.items():
            logger.info("changed since %s: %s was %s, is %s", path.name, key, old, new)
        require_allowed(path, changes, allowed)
        differing = [key for key, value in self._data.identity().items() if saved_identity[key] != value]
        if differing and not allowed:
            raise ConfigError(
                f"{path} was trained on other data ({', '.join(differing)} changed): its position means nothing here; "
                "set the data as they were, set checkpoint.allow_changes to begin these at their start, or start anew "
                "in another job.dump_folder"
            )
        if differing:
            logger.warning("other data than before (%s changed): they begin at their start", ", ".join(differing))
        return not differing


def _check_same_model(saved: dict[str, Any], wanted: dict[str, Any], path: Folder) -> None:
    differing = [f"{key} is {saved.get(key)}, not {wanted[key]}" for key in wanted if saved.get(key) != wanted[key]]
    if differing:
        raise ConfigError(
            f"{path} holds another model ({'; '.join(differing)}); set the model as it was, "
            "or start anew with checkpoint.resume never"
        )


def _set_aside(run_folder: Path, folder: Folder, step: int, *, saves: bool) -> None:
    """Move what a run that goes on after `step` would write over into <run folder>/previous-<n>, checkpoints behind a
    URL into <folder>/previous-<n>: nothing is lost. A run that saves none leaves those outside its run folder."""
    ours = saves or (isinstance(folder, Path) and folder.is_relative_to(run_folder))
    checkpoints = [f"step-{later}" for later in checkpoint.list_steps(folder) if later > step] if ours else []
    starts_over = step == 0 and (bool(checkpoints) or (run_folder / "metrics.jsonl").exists())
    if not checkpoints and not starts_over:
        return
    store = store_of(folder)
    taken = store.folders(folder) if checkpoints else []
    asides = (run_folder / f"previous-{n}" for n in count(1))
    aside = next(path for path in asides if not path.exists() and path.name not in taken)
    aside.mkdir(parents=True)
    for name in checkpoints:
        store.move(folder / name, (aside / "checkpoint" if isinstance(folder, Path) else folder / aside.name) / name)
    for name in OWN_ENTRIES if starts_over else ():
        if (run_folder / name).exists():
            shutil.move(str(run_folder / name), str(aside / name))
    if starts_over:
        logger.warning(
            "an earlier run in %s was moved to %s; --checkpoint.resume auto would go on with it", run_folder, aside
        )
    else:
        logger.warning("the checkpoints after step %d were moved to %s", step, aside)
