"""Scalars for TensorBoard. torch's SummaryWriter writes from a thread that ends, with a traceback, on the first write
that fails, and then raises at every call; this writes the same records through `AppendedFile`."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_like.observe.appended import AppendedFile


class ScalarBoard:
    """A new event file in `folder`; of those that are there, TensorBoard shows the steps up to `start_step`."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # takes long to import
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event = Event
        # Files are read in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step=step, summary={"value": [{"tag": k, "simple_value": v} for k, v in values.items()]})

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
