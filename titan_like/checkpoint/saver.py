"""Saves the checkpoints of a run: at once, or in the background with one save in flight at most."""

import logging
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from titan_like.checkpoint.commit import CheckpointError, retain, step_folder
from titan_like.checkpoint.dcp_files import Group, dcp_save, written_here
from titan_like.checkpoint.manager import random_state, save
from titan_like.checkpoint.staging import Staging
from titan_like.checkpoint.storage import Entry, Folder
from titan_like.config.schema import Checkpoint

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Saver:
    """Collective: every rank makes the same calls in the same order.

    Args:
        group: used by nothing else, so that a save in the background never mixes with the collectives of a step; its
            timeout limits how long one rank may write while the others wait.
    """

    def __init__(self, folder: Folder, settings: Checkpoint, group: Group = None) -> None:
        self.folder, self._settings, self._group = folder, settings, group
        self._thread: ThreadPoolExecutor | None = None
        if settings.async_mode != "disabled":
            # A process that is started by a thread inherits the signals that it blocks: the writer must outlive them.
            block = (signal.SIG_BLOCK, SIGNALS)
            self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=signal.pthread_sigmask, initargs=block)
            self._staging = Staging(shared=settings.async_mode == "process")
        self._in_flight: Future[None] | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], record: Mapping[str, Any], config_toml: str, *, must: bool = False
    ) -> None:
        """Save, or copy the tensors and save in the background. Waits for the save before this one.

        Args:
            must: raise if this fails, even if checkpoint.on_error is "continue".
        Raises:
            CheckpointError: this save failed, or the one before it did in the background.
        """
        self._settle(must=False)
        if self._thread is None:
            self._in_flight = Future()
            try:
                self._write(step, tensors, record, config_toml, random_state())
                self._in_flight.set_result(None)
            except CheckpointError as error:
                self._in_flight.set_exception(error)
            return self._settle(must)
        arguments = (step, self._staging.copy(tensors), record, config_toml, random_state())
        self._in_flight = self._thread.submit(self._write, *arguments)

    def check(self) -> None:
        """Raise what a save in the background has raised, without waiting for one that has not ended."""
        if self._in_flight is not None and self._in_flight.done():
            self._settle(must=False)

    def wait(self) -> None:
        """Until the last save is committed.

        Raises:
            CheckpointError: it failed, whatever checkpoint.on_error is.
        """
        self._settle(must=True)

    def _settle(self, must: bool) -> None:
        ended, self._in_flight = self._in_flight, None
        if ended is None:
            return
        try:
            ended.result()
        except CheckpointError as error:
            if must or self._settings.on_error == "stop":
                raise
            logger.error("%s; going on (checkpoint.on_error continue)", error)

    def _write(
        self, step: int, tensors: dict[str, Tensor], record: Mapping[str, Any], config_toml: str, rng: dict[str, Any]
    ) -> None:
        started = time.perf_counter()
        write = _save_in_process if self._settings.async_mode == "process" else dcp_save
        save(self.folder, step, tensors, record, config_toml, rng=rng, group=self._group, write=write)
        if dist.get_rank() == 0:
            retain(self.folder, self._settings.keep_latest_k, self._settings.keep_every_n)
        seconds = time.perf_counter() - started
        logger.info("checkpoint of step %d in %s, written in %.1f s", step, step_folder(self.folder, step), seconds)


class _AsIs(AsyncStager):
    """The tensors are a copy in shared memory already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def _save_in_process(tensors: dict[str, Tensor], path: Path, group: Group) -> dict[str, Entry]:
    """dcp_save, of a local folder, in a process beside this one, which torch starts at the first use and ends with this
    one."""
    future: Any = dcp.async_save(
        tensors,
        checkpoint_id=path,
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=_AsIs(),
    )
    future.result()
    return written_here(path, dist.get_rank(group))
