"""The metrics of a run as a file of TensorBoard events."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

# What TensorBoard looks for in a file's name, and the first event of a file.
_PREFIX, _VERSION = "events.out.tfevents", "brain.Event:2"


class Board:
    """A file of TensorBoard events in the folder `folder`. All methods raise OSError.

    Events are written at once. torch's SummaryWriter writes them in a thread, which prints a traceback when
    the folder is gone.
    """

    def __init__(self, folder: Path, steps_done: int | None):
        """steps_done: TensorBoard then ignores what an interrupted run wrote about later steps."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{_PREFIX}.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(folder / name, "ab")
        self._write(Event(wall_time=time.time(), file_version=_VERSION))
        if steps_done is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=steps_done, session_log=start))

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            raise OSError(f"{self._file.name} was removed")
        RecordWriter(self._file).write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
