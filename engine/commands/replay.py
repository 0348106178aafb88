"""`zerokl replay` and `zerokl verify run`: steps of a run are done again and compared with its ledger."""

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
    """Steps `first` to `last`, done again.

    `divergence` is the first difference from the ledger. The replay ends there.
    """

    first: int
    last: int
    divergence: Divergence | None


class Replayer:
    """A run whose steps can be done again. Use it as a context: it holds worker processes.

    overrides: settings that decide no bit. checkpoints: the checkpoints that can be used, newest first, where
    they have been checked already; None checks them here. Raises ValueError for a folder without a run, and
    for a run that was altered.
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
        self._first_weights = self.state.optimizer.whole_master().clone()
        self._head = run_head(self.state, {"workers in use": self.state.parallel.n})
        if altered := compare_heads(self.ledger.head, self._head):
            self.__exit__()
            raise ValueError(
                f"replay: {path} cannot be repeated, since what it started from is another now; {altered}"
            )

    def _checkpoints(self) -> list[Checkpoint]:
        usable = []
        for folder in checkpoint_folders(self.path):
            checkpoint, damage = usable_checkpoint(folder, self.ledger, self.config)
            if checkpoint is not None:
                usable.append(checkpoint)
            else:
                self.messages.append(f"{damage}; not used")
        return usable

    def replay(
        self,
        step: int,
        until: int | None = None,
        trace: Path | None = None,
        before: Callable[[TrainState], None] | None = None,
    ) -> Replay:
        """Do the steps up to `until` (default `step`) again, from the newest checkpoint at or before `step`.

        trace: a file; every operation of step `step` is written to it. before: called with the state before
        each step. Raises ValueError for steps that the ledger does not hold.
        """
        until, recorded = step if until is None else until, len(self.ledger.lines)
        if not 0 <= step <= until < recorded:
            raise ValueError(
                f"replay: steps {step} to {until} must lie in 0 to {recorded - 1}, "
                f"the steps that {self.ledger.path} holds"
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
        """Restore the newest checkpoint at or before `step`, and the ledger up to it. Returns its step.

        Without such a checkpoint, the state goes back to before the first step.
        """
        state = self.state
        checkpoint = next((c for c in self.checkpoints if c.step <= step), None)
        if checkpoint is not None:
            restore(state, checkpoint)
        else:
            rewind(state, self._first_weights)
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
    """Check a run: its ledger's chain, its summary, its checkpoints' hashes, its logs, and `replays` steps.

    The steps are drawn at random with `seed`, and done again. Raises ValueError for a folder without a run,
    and for an override that decides bits.
    """
    config = run_config(path, overrides)
    ledger = read_ledger(run_ledger(path))
    if ledger.damage or ledger.head is None:
        return [Finding("ledger", ledger.damage or f"{ledger.path} has no whole head", False)]
    chain = f"{len(ledger.lines)} steps, chain unbroken"
    if ledger.torn:
        chain += ", and a torn line after them"
    findings = [
        Finding("ledger", chain, not (ledger.torn and (path / "summary.json").exists())),
        *_summary(path, ledger),
    ]
    intact: list[Checkpoint] = []  # newest first
    for folder in reversed(checkpoint_folders(path)):
        checkpoint, damage = checked_checkpoint(folder, ledger)
        result = damage or "every hash right, its place in the chain, and the ledger's bits"
        findings.append(Finding(folder.name, result, not damage))
        intact = [checkpoint, *intact] if checkpoint else intact
    findings += _logs(path, config, intact[0] if intact else None)
    try:
        replayer = Replayer(path, overrides, [] if config.samples_older_weights else intact)
    except ValueError as error:
        return [*findings, Finding("replay", str(error), False)]
    with replayer:
        return findings + _replays(replayer, replays, seed)


def _replays(replayer: Replayer, n: int, seed: int) -> list[Finding]:
    """Up to n steps of the run, drawn at random and done again in ascending order."""
    recorded = len(replayer.ledger.lines)
    if not recorded:
        return []
    findings = []
    for step in sorted(permutation(recorded, seed, Stream.ORDER, 0)[:n].tolist()):
        replay = replayer.replay(step)
        if replay.divergence:
            result = f"differs at {replay.divergence}"
        else:
            result = f"the same bits (from step {replay.first})"
        findings.append(Finding(f"replay of step {step}", result, replay.divergence is None))
    return findings


def _logs(path: Path, config: Config, newest: Checkpoint | None) -> list[Finding]:
    """Metrics and rollouts: every line in its place, and the hash that the newest checkpoint has of them."""
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
