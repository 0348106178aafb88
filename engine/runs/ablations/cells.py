"""The processes of an ablation's cells: each runs `zerokl train`, some side by side (cell_command.py).

A cell has a process of its own, because what an engine leaves behind (vLLM keeps threads and memory) would
slow the cells after it. The threads of the machine are divided among the cells that run at once. By the law
neither the threads nor the neighbours of a cell decide a bit of it.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch

from ....files.inputs import open_input
from ....files.reading import one_line, parse_json, read_json
from ...config.config_file import to_toml
from ...processes.process import ForkServer, Process
from ..folder import FAILED, METRICS
from ..summary import SUMMARY
from .grid import Cell

# What a cell's process runs, and what is imported once for all: the imports are a tenth of a short run.
_COMMAND = "zerokl.engine.runs.ablations.cell_command:run_command"
IMPORTS = "zerokl.engine.runs.ablations.cell_command:import_what_every_run_imports"
# How often the cells are looked at, in seconds.
_POLL_S = 0.25


class State(Enum):
    """How far a cell is. STOPPED is a result (the run ended by itself), FAILED is none."""

    LEFT = "left"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "ended by itself"
    FAILED = "failed"


class CellRun:
    """A cell, the folder of its run, and how far the run is.

    reason: why it is STOPPED or FAILED. steps: how many are done. kept: steps that were done before this
    ablation began. first_reward, reward: of the first and of the newest step.
    """

    def __init__(self, cell: Cell, path: Path):
        self.cell, self.path = cell, path
        self.reason, self.steps, self.seconds = "", 0, 0.0
        self.first_reward: float | None = None
        self.reward: float | None = None
        self._bytes_read, self._log_begins_at = 0, 0
        self._process: Process | None = None
        self._began_s, self._was_interrupted = 0.0, False
        self._read_metrics()
        self.kept = self.steps
        self.state = self._result() or State.LEFT

    @property
    def name(self) -> str:
        """The cell's name, for a terminal."""
        return one_line(self.cell.folder)

    @property
    def log(self) -> Path:
        """The file that takes what the cell's process prints."""
        return self.path.parent / f"{self.path.name}.log"

    def start(self, forks: ForkServer, threads: int) -> None:
        """Start the cell's process, or let an interrupted run go on.

        threads: of the process. Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        config = self.path.parent / f"{self.path.name}.toml"
        config.write_text(to_toml(self.cell.config), encoding="utf-8")
        if (self.path / "config.toml").exists():
            words = ["train", "--resume", str(self.path)]
        else:
            words = ["train", str(config), "--run_dir", str(self.path)]
        self._log_begins_at = self.log.stat().st_size if self.log.exists() else 0
        # Ctrl-C reaches the ablation alone, which decides what it means.
        self._process = start_command(words, self.log, forks, threads)
        self.state, self._began_s = State.RUNNING, time.monotonic()

    def has_ended(self) -> bool:
        """Look at the process and at what it has written since. After the end, `state` says how it ended."""
        ending = self._process.ending(wait=False)
        self._read_metrics()
        if ending is None:
            return False
        self._process.close()
        self.seconds = time.monotonic() - self._began_s
        self.state = self._result() or (State.LEFT if self._was_interrupted else State.FAILED)
        if self.state is State.FAILED:
            self.reason = self._last_words() or f"its process {ending}; see {self.log}"
        return True

    def interrupt(self) -> None:
        """Ask the process to end, as Ctrl-C does. The run is then one of those that are left."""
        self._was_interrupted = True
        if self._process:
            self._process.interrupt()

    def kill(self) -> None:
        """End the process and those that it has started, now."""
        if self._process:
            self._process.close()

    def _result(self) -> State | None:
        if (self.path / SUMMARY).exists():
            return State.DONE
        if (self.path / FAILED).exists():
            note = read_json(self.path / FAILED)
            if note.get("result", True):
                self.reason = one_line(str(note.get("error")))
                return State.STOPPED
        return None

    def _last_words(self) -> str:
        """The line in which the process said why it ends; empty where it said nothing."""
        with open_input(self.log) as log:
            log.seek(self._log_begins_at)
            lines = log.read().decode(errors="replace").splitlines()
        reasons = [line.removeprefix("zerokl: ") for line in lines if line.startswith("zerokl: ")]
        return one_line(reasons[-1]) if reasons else ""

    def _read_metrics(self) -> None:
        """Count the steps that were written since, and read the rewards."""
        file = self.path / METRICS
        try:
            with open_input(file) as log:
                if os.fstat(log.fileno()).st_size < self._bytes_read:
                    self._bytes_read = self.steps = 0  # a run that goes on has cut it back to its checkpoint
                log.seek(self._bytes_read)
                new = log.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._bytes_read += len(whole)
        lines = whole.splitlines()
        if lines and not self.steps:
            self.first_reward = _reward(lines[0])
        if lines:
            self.reward = _reward(lines[-1])
        self.steps += len(lines)


def start_command(words: Sequence[str], log: Path, forks: ForkServer, threads: int) -> Process:
    """Run `zerokl` with these words. log: the file to whose end it prints. threads: that torch computes with.

    Raises OSError where the log cannot be written.
    """
    with open(log, "ab") as output:
        process = Process(_COMMAND, output.fileno(), {"OMP_NUM_THREADS": str(threads)}, forks=forks)
    with suppress(OSError):  # it has ended already, which its ending says
        process.channel.send(json.dumps([threads, *words]).encode())
    return process


def _reward(line: bytes) -> float | None:
    """The reward in a line of metrics; None where it has none. The line is checked where it is used."""
    try:
        metrics = parse_json(line, non_finite=True)
    except ValueError:
        return None
    reward = metrics.get("reward/mean") if isinstance(metrics, dict) else None
    return reward if isinstance(reward, int | float) else None


class Watcher(Protocol):
    """Shows how the cells get on."""

    def begin(self, jobs: int) -> None:
        """The cells that are left are about to run, `jobs` at a time."""

    def look(self) -> None:
        """Some time has passed."""

    def ended(self, run: CellRun) -> None:
        """A cell has ended."""

    def interrupted(self) -> None:
        """Ctrl-C: the cells are asked to end."""

    def close(self) -> None:
        """No cell runs any more."""


def run_cells(runs: Sequence[CellRun], jobs: int, watcher: Watcher) -> None:
    """Run the cells that are left, `jobs` at a time.

    A cell that fails does not end the others. No process of a cell outlives this call: at Ctrl-C each is
    asked to end, and at the second Ctrl-C it is killed. Raises KeyboardInterrupt then.
    """
    left = [run for run in runs if run.state is State.LEFT]
    threads = max(1, torch.get_num_threads() // jobs)
    running: list[CellRun] = []
    watcher.begin(jobs)
    forks = ForkServer(IMPORTS) if left else None
    try:
        while left or running:
            ended = [run for run in running if run.has_ended()]
            running = [run for run in running if run not in ended]
            while left and len(running) < jobs:
                running.append(left.pop(0))
                running[-1].start(forks, threads)
            for run in ended:
                watcher.ended(run)
            watcher.look()
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        watcher.interrupted()
        for run in running:
            run.interrupt()
        for run in running:
            while not run.has_ended():
                time.sleep(_POLL_S)
            watcher.ended(run)
        raise
    finally:
        for run in running:
            run.kill()
        if forks:
            forks.close()
        watcher.close()
