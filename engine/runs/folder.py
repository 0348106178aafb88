"""The files of a run: its configuration, metrics, rollouts and TensorBoard files."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.inputs import read_bytes
from ...files.reading import one_line
from ...files.writing import check_in_place, check_writable, naming, write_whole
from ...verify.ledger import LEDGER
from ...verify.run_files import CONFIG, ROLLOUTS
from ..config.config_file import to_toml
from ..config.run_config import Config
from ..train.ledger_recorder import Recorder
from ..train.state import StepRecord
from .rollout_lines import rollout_line
from .trackers import TRACKERS, Trackers

METRICS = "metrics.jsonl"
# Why a run ended by itself: {"error": ...}. A run that goes on removes it.
FAILED = "failed.json"
# What a folder holds only if it is the folder of a run.
_RUN_FILES = (
    "config.toml",
    LEDGER,
    METRICS,
    ROLLOUTS,
    "checkpoints",
    "summary.json",
    "report.html",
    "tensorboard",
    TRACKERS,
    "mismatch",
    "profile",
)


def refuse_taken(path: Path) -> None:
    """Raise ValueError when the folder already holds a run, and OSError when it cannot be written."""
    present = [name for name in _RUN_FILES if (path / name).exists()]
    if present:
        raise ValueError(f"run: {path} already holds a run ({present[0]}); choose another --run_dir")
    check_writable(path)


def check_shape(path: Path, to_write: bool) -> None:
    """Raise ValueError where a file of a run is no file, or a folder of it is no folder.

    to_write: also where one cannot be written.
    """
    for name in (CONFIG, LEDGER, METRICS, ROLLOUTS, "summary.json"):
        _check_kind(path / name, Path.is_file, "a file", to_write)
    for name in (".", "checkpoints", "tensorboard"):
        _check_kind(path / name, Path.is_dir, "a folder", to_write)


def _check_kind(path: Path, is_kind: Callable[[Path], bool], kind: str, to_write: bool) -> None:
    if not os.path.lexists(path):
        return
    if not is_kind(path):
        raise ValueError(f"run: {path} is not {kind}, as a run needs; nothing was changed, put it back")
    if to_write and not os.access(path, os.W_OK):
        raise ValueError(f"run: {path} cannot be written; nothing was changed, make it writable")


def finite(x: Any) -> Any:
    """A copy of x for JSON, which has no infinities and no NaN: they become null.

    x: dicts, lists and values.
    """
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class _Log:
    """A JSONL file to which lines are appended, and the hash of its content."""

    def __init__(self, path: Path):
        self.path = path
        self._hash = hashlib.sha256(read_bytes(path) if path.exists() else b"")
        self._file = open(path, "ab")

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self._hash.update(content)
        check_in_place(self._file, self.path)
        with naming(self.path):
            self._file.write(content)
            self._file.flush()

    def sync(self) -> str:
        with naming(self.path):
            os.fsync(self._file.fileno())
        check_in_place(self._file, self.path)
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def write_config(path: Path, config: Config) -> None:
    """Write the whole resolved configuration of the run in the folder `path`."""
    write_whole(path / "config.toml", to_toml(config).encode())


class RunFolder:
    """The files of a run in the folder `path`.

    recorder: writes the ledger among them; whoever opened it closes it.
    """

    def __init__(self, path: Path, recorder: Recorder, trackers: Trackers):
        self.path, self.recorder, self._trackers = path, recorder, trackers
        (path / FAILED).unlink(missing_ok=True)
        self._metrics = _Log(path / METRICS)
        self._rollouts = _Log(path / ROLLOUTS)

    def record(self, record: StepRecord, extra: dict[str, float]) -> None:
        """Append the metrics and rollouts of a finished step. extra: further metrics of it."""
        metrics = record.metrics | extra
        self._metrics.write([finite(metrics | record.notes)])
        P, G = record.episodes.rewards.shape
        lines = [rollout_line(record, p, g, G) for p in range(P) for g in range(G)]
        self._rollouts.write(lines)
        self._trackers.record(metrics, lines)

    def sync(self) -> dict[str, str]:
        """Wait until metrics and rollouts are on the disk. Returns file name -> SHA-256 of the file so far.

        A checkpoint must never be ahead of these files.
        """
        return {log.path.name: log.sync() for log in (self._metrics, self._rollouts)}

    def fail(self, error: Exception) -> None:
        """Note why the run ends before its last step, though nobody ended it.

        A ValueError is noted as no result of the run: whoever mends a reward goes on with it.
        """
        note = {"error": one_line(str(error)), "result": not isinstance(error, ValueError)}
        write_whole(self.path / FAILED, (json.dumps(note) + "\n").encode())

    def discard(self) -> None:
        """Remove the files of a new run that was refused before its first step was done."""
        self.close({})
        for name in (CONFIG, LEDGER, METRICS, ROLLOUTS, TRACKERS):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close the files. summary: for the trackers; empty for a run that did not reach its end.

        Closing twice is allowed.
        """
        self._metrics.close()
        self._rollouts.close()
        self._trackers.close(summary)


class NoFolder:
    """Takes the place of a RunFolder in a rank that writes nothing. Its recorder has the ledger in memory."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def record(self, record: StepRecord, extra: dict[str, float]) -> None:
        """Do nothing."""

    def sync(self) -> dict[str, str]:
        """Do nothing."""
        return {}

    def fail(self, error: Exception) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""
