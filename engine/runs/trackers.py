"""Where the metrics of a run go besides its folder: TensorBoard, Weights & Biases, Trackio, MLflow.

Each tracker has a thread of its own, which takes what the run has to say from a queue. A tracker that fails
is said once and hears no more; one that is too slow loses steps. So no tracker ends a run, or slows it.
"""

import importlib
import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...files.reading import read_json
from ...files.writing import write_whole
from ..display.terminal import console
from .board import Board

# The file in a run's folder with the name that each tracker has for the run, so that a resumed run goes on
# in the same place.
TRACKERS = "trackers.json"
# Steps that may wait for a tracker, and seconds that the end of a run waits for the last of them.
_WAITING, _LAST_S = 1024, 60.0
# Rollouts of a table, and tables of a run.
_TABLE_ROWS, _TABLES = 32, 20
_COLUMNS = ("step", "prompt_text", "text", "reward", "advantage", "finish")
# Our metrics under the names that users of TRL (train/, eval/) and of verl know.
ALIASES = {
    "reward/mean": ("train/reward", "critic/rewards/mean"),
    "reward/std": ("train/reward_std",),
    "loss": ("train/loss", "actor/pg_loss"),
    "entropy": ("train/entropy", "actor/entropy"),
    "grad_norm": ("train/grad_norm", "actor/grad_norm"),
    "lr": ("train/learning_rate", "actor/lr"),
    "ref/k3": ("train/kl", "actor/kl_loss"),
    "response_len/mean": ("train/completions/mean_length", "response_length/mean"),
    "response_len/max": ("train/completions/max_length", "response_length/max"),
    "perf/tokens_per_s": ("perf/throughput",),
}
# The package that each tracker needs, and what pip installs it by: the extra that has the tracker's name.
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
_REQUIREMENTS = {
    "tensorboard": "'tensorboard>=2.18'",
    "wandb": "'wandb>=0.19'",
    "trackio": "'trackio>=0.5' 'pandas>=2'",
    "mlflow": "'mlflow-skinny>=3' 'pandas>=2' 'sqlalchemy>=2' 'alembic>=1.13'",
}


@dataclass(frozen=True)
class RunStart:
    """What a tracker learns when it begins."""

    path: Path
    steps: int  # of the whole run
    steps_done: int | None  # of a run that goes on; None for a new one
    settings: Mapping[str, Any]  # dotted key -> value
    environment: Mapping[str, Any]
    run_id: str | None  # the tracker's name of the run that goes on

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.path.resolve().name

    @property
    def project(self) -> str:
        """The project, which the environment variable ZEROKL_PROJECT names."""
        return os.environ.get("ZEROKL_PROJECT", "zerokl")


class Tracker(Protocol):
    """One tracker's library. All calls come from one thread."""

    run_id: str | None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write some rollouts of a step."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """End the run. summary: the fingerprint, for example; empty for a run that did not reach its end."""


class _TensorBoard:
    run_id = None

    def __init__(self, start: RunStart):
        self._board = Board(start.path / "tensorboard", start.steps_done)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._board.add(metrics, step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """TensorBoard has no tables."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._board.close()


class _Wandb:
    def __init__(self, start: RunStart):
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=start.project,
            name=start.name,
            dir=str(start.path),
            config={**start.settings, "environment": dict(start.environment)},
            id=start.run_id,
            resume="allow" if start.run_id else None,
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self.run_id = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_renamed(metrics), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[row[name] for name in _COLUMNS] for row in rows]
        self._run.log({"rollouts": self._wandb.Table(columns=list(_COLUMNS), data=data)}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


class _Trackio:
    def __init__(self, start: RunStart):
        self._trackio = importlib.import_module("trackio")
        # Trackio knows a run by its name, so two folders of one name must not share it.
        self.run_id = start.run_id or f"{start.name}-{os.urandom(3).hex()}"
        self._run = self._trackio.init(
            project=start.project,
            name=self.run_id,
            config={**start.settings, **{f"environment.{k}": str(v) for k, v in start.environment.items()}},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(_renamed(metrics), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pandas = importlib.import_module("pandas")
        frame = pandas.DataFrame([{name: row[name] for name in _COLUMNS} for row in rows])
        self._trackio.log({"rollouts": self._trackio.Table(dataframe=frame)}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        # Trackio has no summary of a run; text may be logged.
        if summary:
            self._trackio.log(dict(summary))
        self._trackio.finish()


class _Mlflow:
    def __init__(self, start: RunStart):
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        mlflow = importlib.import_module("mlflow")
        # A client: the module's own functions keep the run in a variable of the process.
        self._client = mlflow.MlflowClient()
        if start.run_id:
            self.run_id = start.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(start.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(start.project)
        self.run_id = self._client.create_run(experiment, run_name=start.name).info.run_id
        for key, value in start.settings.items():
            self._client.log_param(self.run_id, key, value)
        for key, value in start.environment.items():
            self._client.set_tag(self.run_id, f"environment.{_word(key)}", str(value)[:5000])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in _renamed(metrics).items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = {name: [row[name] for row in rows] for name in _COLUMNS}
        # A file of its own for each table: MLflow reads a table again to add to it.
        self._client.log_table(self.run_id, data, f"rollouts/step-{step:06d}.json")

    def close(self, summary: Mapping[str, Any]) -> None:
        for key, value in summary.items():
            self._client.set_tag(self.run_id, key, value)
        self._client.set_terminated(self.run_id, "FINISHED" if summary else "KILLED")


_MAKERS: dict[str, Callable[[RunStart], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


def _renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under our names, and under those of ALIASES."""
    others = {alias: value for name, value in metrics.items() for alias in ALIASES.get(name, ())}
    return {**metrics, **others}


def _word(key: str) -> str:
    """A key with the characters that MLflow allows in names."""
    return "".join(c if c.isalnum() or c in "_-./ :" else "_" for c in key)


def require_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ValueError(
                f"tracking: {name} is not installed; pip install {_REQUIREMENTS[name]}, or leave it out"
            )


class Trackers:
    """The trackers of a run."""

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        steps: int,
        steps_done: int | None,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
    ):
        file = path / TRACKERS
        run_ids = read_json(file) if file.exists() and steps_done is not None else {}
        self._every, self._last = max(1, steps // _TABLES), steps - 1
        self._lock, self._file, self._run_ids = threading.Lock(), file, run_ids
        self._threads = [
            _Thread(
                name,
                RunStart(path, steps, steps_done, settings, environment, run_ids.get(name)),
                self._keep_id,
            )
            for name in names
        ]

    def _keep_id(self, name: str, run_id: str | None) -> None:
        """Write down a tracker's name for the run. The tracker's thread calls it."""
        if run_id is not None:
            with self._lock:
                self._run_ids[name] = run_id
                write_whole(self._file, (json.dumps(self._run_ids) + "\n").encode())

    def record(self, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Hand over a finished step. rollouts: its lines of rollouts.jsonl."""
        step = int(metrics["step"])
        values = {name: value for name, value in metrics.items() if name != "step"}
        rows = rollouts[:_TABLE_ROWS] if step % self._every == 0 or step == self._last else []
        for thread in self._threads:
            thread.put(lambda t: t.log(step, values))
            if rows:
                thread.put(lambda t: t.table(step, rows))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Wait until the trackers have written everything, but not for ever. summary: see Tracker.close."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.put(lambda t: t.close(summary), last=True)
        for thread in threads:
            thread.wait()


class _Thread:
    """One tracker and what waits for it."""

    def __init__(self, name: str, start: RunStart, keep_id: Callable[[str, str | None], None]):
        self.name, self._start, self._keep_id = name, start, keep_id
        self._queue: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._failed = self._lost = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[Tracker], None], last: bool = False) -> None:
        """Hand over something to write; the tracker drops it where too much waits already."""
        if self._failed:
            return
        if not last and self._queue.qsize() >= _WAITING:
            if not self._lost:
                self._lost = True
                console.print(f"tracking: {self.name} is too slow; it loses steps, and the run goes on")
            return
        self._queue.put(task)
        if last:
            self._queue.put(None)

    def _work(self) -> None:
        try:
            tracker = _MAKERS[self.name](self._start)
            self._keep_id(self.name, tracker.run_id)
            while (task := self._queue.get()) is not None:
                task(tracker)
        except BaseException as error:  # of a library that we do not know, SystemExit included
            self._failed = True
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            console.print(f"tracking: {self.name} failed ({reason}); the run goes on without it")

    def wait(self) -> None:
        """Wait for the last of its work."""
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            console.print(f"tracking: {self.name} did not end in {_LAST_S:g} s; it may lack the last steps")
