"""`zerokl train --resume`: where an interrupted run can go on, to the bit.

A run goes on from the newest checkpoint that is intact and that ledger, metrics and rollouts reach; these
files are then cut back to its step. Each file that is damaged is named, and what was cut because of damage is
kept beside it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ...verify.files import first_free, whole_lines, write_whole
from ...verify.ledger import LEDGER, Head, LedgerFile, read_ledger
from .checkpoints import DAMAGED, Checkpoint, checkpoint_folders, clear_leftovers, usable_checkpoint
from ..config import Config
from ..config_file import load_config
from .head import REFERENCE, flat_settings, is_free
from .folder import METRICS, ROLLOUTS


@dataclass
class Log:
    """A JSONL file of a run, as far as it is intact: `ends`[s] bytes hold the steps before s."""

    path: Path
    ends: list[int] = field(default_factory=lambda: [0])
    damage: str | None = None

    def hash_at(self, step: int) -> str:
        """SHA-256 of what it holds of the steps before `step`."""
        return hashlib.sha256(self.path.read_bytes()[: self.ends[step]]).hexdigest()


@dataclass
class Resumption:
    """Where a run goes on. Nothing is changed before `prepare`."""

    path: Path
    config: Config
    checkpoint: Checkpoint | None  # None: from the first step
    ledger: LedgerFile
    logs: list[Log]
    history: list[dict[str, float]]
    messages: list[str]  # a line for each damaged file
    unusable: list[Path]  # checkpoints that must make room

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.checkpoint.step if self.checkpoint else 0

    def check_head(self, head: Head) -> None:
        """Raise ValueError when the run would not be the same run:

        another configuration, other data, other weights.
        """
        held = self.ledger.head
        if held is None:
            return
        for key in sorted(held.settings.keys() | head.settings.keys()):
            if (was := held.settings.get(key)) != (now := head.settings.get(key)):
                if key == REFERENCE:
                    place = self.config.loss.ref_model or self.config.model
                    raise ValueError(
                        f"resume: the weights of the reference, {place}, are {now}; the run began with {was}; put them back, or set "
                        f"{REFERENCE} to where they are"
                    )
                file = "config.json of the run's first model" if key.startswith("model.") else self.path / "config.toml"
                raise ValueError(f"resume: {key} is {now!r} in {file} and {was!r} in the ledger; the file was altered")
        if held.data != head.data:
            raise ValueError("resume: the training problems are not those of the run; put the task's data back as it was")
        if held.weights != head.weights:
            raise ValueError(f"resume: the weights of {self.config.model} are not those that the run began with")

    def prepare(self) -> LedgerFile | None:
        """Cut the files back to `step` and make room for new checkpoints.

        Returns the ledger that is gone on from, if it has a head.
        """
        clear_leftovers(self.path)
        for folder in self.unusable:
            folder.rename(_free_name(folder))
        ends = {log.path: log.ends[self.step] for log in self.logs}
        ends[self.ledger.path] = self.ledger.ends[self.step] if self.ledger.head else 0
        for path, end in ends.items():
            content = path.read_bytes() if path.exists() else b""
            if self.messages and len(content) > end:
                write_whole(_free_name(path), content)
            if len(content) != end:
                write_whole(path, content[:end])
        (self.path / "summary.json").unlink(missing_ok=True)
        return read_ledger(self.ledger.path).whole() if self.ledger.head else None


def _free_name(path: Path) -> Path:
    return first_free(path.with_name(f"{path.name}{DAMAGED}{n or ''}") for n in count())


def find_resumption(path: Path, overrides: Mapping[str, Any]) -> Resumption:
    """Where the run in the folder `path` can go on.

    Raises ValueError when it holds none, or for an override that decides bits.
    """
    config = run_config(path, overrides)
    ledger = read_ledger(path / LEDGER) if (path / LEDGER).exists() else LedgerFile(path / LEDGER)
    metrics = read_log(path / METRICS, 1)
    rollouts = read_log(path / ROLLOUTS, config.prompts * config.num_generations)
    messages = [f"{damage}; going on from before it" for damage in (ledger.damage, metrics.damage, rollouts.damage) if damage]
    checkpoint, unusable, logs = None, [], [metrics, rollouts]
    for folder in checkpoint_folders(path):
        found, damage = usable_checkpoint(folder, ledger, config)
        if found is None:
            messages.append(f"{damage}; not used")
        elif found.step >= min(len(metrics.ends), len(rollouts.ends)):
            messages.append(f"{folder} is ahead of {METRICS} or {ROLLOUTS}; not used")
        elif altered := next((log for log in logs if log.hash_at(found.step) != found.logs.get(log.path.name)), None):
            messages.append(f"{altered.path} was altered before step {found.step}, as its hash in {folder} shows; going on from before it")
        else:
            checkpoint = found
            break
        unusable.append(folder)
    step = checkpoint.step if checkpoint else 0
    if step > config.steps:
        raise ValueError(f"resume: steps ({config.steps}) must be at least {step}, the steps that {path} has done")
    history = [_numbers(json.loads(line)) for line in metrics.path.read_bytes()[: metrics.ends[step]].splitlines()] if step else []
    return Resumption(path, config, checkpoint, ledger, logs, history, messages, unusable)


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics as it was before it was written: what JSON has no number for was an infinity."""
    return {k: float("inf") if v is None else v for k, v in line.items()}


def run_config(path: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a run with overrides.

    Raises ValueError for one that decides bits, or a folder without a run.
    """
    file = path / "config.toml"
    if not file.exists():
        raise ValueError(f"run: {path} holds no run (no config.toml); start one with --run-dir {path}")
    was = load_config(str(file), None, {})
    now = load_config(str(file), None, overrides)
    before, after = flat_settings(was), flat_settings(now)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not (is_free(key, was) and is_free(key, now)):
            raise ValueError(
                f"run: {key} ({after.get(key)!r}, was {before.get(key)!r}) decides bits; in a run that exists only what decides none "
                "can change, such as workers, threads and micro_batch"
            )
    return now


def read_log(path: Path, lines_per_step: int) -> Log:
    """Check every line: JSON, and the step it belongs to."""
    log, at = Log(path), 0
    lines, _ = whole_lines(path.read_bytes() if path.exists() else b"")
    for number, raw in enumerate(lines, 1):
        try:
            fits = json.loads(raw)["step"] == (number - 1) // lines_per_step
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            log.damage = f"{path} line {number} is damaged"
            break
        at += len(raw)
        if number % lines_per_step == 0:
            log.ends.append(at)
    return log
