"""`zerokl replay` and `zerokl verify run`:

steps of a run done again from the nearest checkpoint, and compared with its ledger.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.philox import Stream, permutation
from ...verify.divergence import Divergence, compare_heads, compare_lines, open_run, run_ledger
from ...verify.ledger import LedgerFile, read_ledger
from ..config import Config
from ..runs.base_model import base_model
from ..runs.checkpoints import (
    Checkpoint,
    checked_checkpoint,
    checkpoint_folders,
    restore,
    rewind,
    usable_checkpoint,
)
from ..runs.folder import METRICS, ROLLOUTS
from ..runs.head import run_head
from ..runs.resume import read_log, run_config
from ..runs.setup import make_state
from ..tasks import load_task
from ..train.recorder import Recorder
from ..train.state import TrainState
from ..train.step import train_step
from .trace import trace_step


@dataclass(frozen=True)
class Replay:
    """Steps `first` to `last` done again.

    `divergence` is the first difference from the ledger; after it nothing is done.
    """

    first: int
    last: int
    divergence: Divergence | None


class Replayer:
    """A run that can be done again, from any step on. Raises ValueError for a folder without a run, or one
    that was altered.

    overrides: settings that decide no bit. checkpoints: those that can be used, newest first, where they have
    been checked already. Use as a context: it holds worker processes.
    """

    def __init__(
        self,
        path: Path,
        overrides: Mapping[str, Any] | None = None,
        checkpoints: list[Checkpoint] | None = None,
    ):
        self.path, self.ledger = path, open_run(path)
        self.config = run_config(path, overrides or {})
        self.messages: list[str] = []  # a line for each checkpoint that cannot be used
        self.checkpoints = self._checkpoints() if checkpoints is None else checkpoints
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        task = load_task(self.config.task.name, self.config.task.options)
        self.state: TrainState = make_state(self.config, base_model(self.config, path), task)
        self._start = self.state.optimizer.whole_master().clone()
        self._head = run_head(self.state, {"workers in use": self.state.parallel.n})
        if altered := compare_heads(self.ledger.head, self._head):
            self.__exit__()
            raise ValueError(
                f"replay: {path} can not be repeated, since what it started from is another now; {altered}"
            )

    def _checkpoints(self) -> list[Checkpoint]:
        good = []
        for folder in checkpoint_folders(self.path):
            found, damage = usable_checkpoint(folder, self.ledger, self.config)
            if found is not None:
                good.append(found)
            else:
                self.messages.append(f"{damage}; not used")
        return good

    def replay(
        self,
        step: int,
        until: int | None = None,
        trace: Path | None = None,
        before: Callable[[TrainState], None] | None = None,
    ) -> Replay:
        """Do steps up to `until` (default `step`) again, from the newest checkpoint at or before `step`.

        trace: file to write every operation of step `step` to. before: called with the state before each
        step. Raises ValueError for steps that the ledger does not hold.
        """
        until, done = step if until is None else until, len(self.ledger.lines)
        if not 0 <= step <= until < done:
            raise ValueError(
                f"replay: steps {step} to {until} must lie in 0 to {done - 1}, the steps that {self.ledger.path} holds"
            )
        first = self._go_to(step)
        state = self.state
        while state.step <= until:
            line = self.ledger.lines[state.step]
            if before:
                before(state)
            if trace is not None and state.step == step:
                trace_step(state, trace)
            else:
                train_step(state)
            again = state.recorder.ledger.last
            if divergence := compare_lines(self.ledger.head, line, again):
                return Replay(first, line.step, divergence)
        return Replay(first, until, None)

    def _go_to(self, step: int) -> int:
        """Put the state of the nearest checkpoint at or before `step` in place, and the ledger up to it.

        Returns its step.
        """
        state = self.state
        checkpoint = next((c for c in self.checkpoints if c.step <= step), None)
        if checkpoint is not None:
            restore(state, checkpoint)
        else:
            rewind(state, self._start)
        before = LedgerFile(self.ledger.path, self.ledger.head, self.ledger.lines[: state.step])
        state.recorder = Recorder(None, self._head, self.config.ledger, state.optimizer, before)
        return state.step

    def __enter__(self) -> "Replayer":
        return self

    def __exit__(self, *_: object) -> None:
        self.state.close()


@dataclass(frozen=True)
class Finding:
    """One line of `zerokl verify run`."""

    what: str
    result: str
    holds: bool


def verify_run(path: Path, replays: int, seed: int, overrides: Mapping[str, Any]) -> list[Finding]:
    """Check a run: its ledger's chain, its checkpoints' hashes, its logs, its summary, and `replays` steps
    drawn at random, done again.

    Raises ValueError for a folder without a run, or an override that decides bits.
    """
    config, good = run_config(path, overrides), []
    ledger = read_ledger(run_ledger(path))
    if ledger.damage or ledger.head is None:
        return [Finding("ledger", ledger.damage or f"{ledger.path} has no whole head", False)]
    said = f"{len(ledger.lines)} steps, chain unbroken" + (
        ", and a torn line after them" if ledger.torn else ""
    )
    findings = [
        Finding("ledger", said, not (ledger.torn and (path / "summary.json").exists())),
        *_summary(path, ledger),
    ]
    for folder in reversed(checkpoint_folders(path)):
        found, damage = checked_checkpoint(folder, ledger)
        findings.append(
            Finding(
                folder.name,
                damage or "every hash right, its place in the chain, and the ledger's bits",
                not damage,
            )
        )
        good = [found, *good] if found else good
    findings += _logs(path, config, good[0] if good else None)
    drawn = (
        sorted(permutation(len(ledger.lines), seed, Stream.ORDER, 0)[:replays].tolist())
        if ledger.lines
        else []
    )
    try:
        replayer = Replayer(path, overrides, [] if config.samples_older_weights else good)
    except ValueError as error:
        return [*findings, Finding("replay", str(error), False)]
    with replayer:
        for step in drawn:
            done = replayer.replay(step)
            said = (
                f"differs at {done.divergence}"
                if done.divergence
                else f"the same bits (from step {done.first})"
            )
            findings.append(Finding(f"replay of step {step}", said, done.divergence is None))
    return findings


def _logs(path: Path, config: Config, newest: Checkpoint | None) -> list[Finding]:
    """Metrics and rollouts:

    every line in its place, and up to the newest checkpoint as their hashes there.
    """
    findings = []
    for log in (
        read_log(path / METRICS, 1),
        read_log(path / ROLLOUTS, config.prompts * config.num_generations),
    ):
        wrong = log.damage
        if (
            not wrong
            and newest
            and (newest.step >= len(log.ends) or log.hash_at(newest.step) != newest.logs.get(log.path.name))
        ):
            wrong = f"was altered before step {newest.step}, as its hash in {newest.folder.name} shows"
        findings.append(Finding(log.path.name, wrong or f"{len(log.ends) - 1} steps", not wrong))
    return findings


def _summary(path: Path, ledger: LedgerFile) -> list[Finding]:
    file = path / "summary.json"
    if not file.exists():
        return [Finding("summary", "none: the run is not finished", True)]
    try:
        fits = json.loads(file.read_text(encoding="utf-8"))["fingerprint"] == ledger.chain
    except (ValueError, KeyError, TypeError):
        return [Finding("summary", f"{file} is damaged", False)]
    return [
        Finding("summary", f"its fingerprint is {'' if fits else 'not '}the ledger's last chain value", fits)
    ]
