"""`zerokl train --resume`: where an interrupted run can go on, to the bit.

A run goes on from its newest intact checkpoint whose step the ledger, the metrics and the rollouts reach.
These three files are then cut back to this step. A message names each damaged file. A file that is cut
because of damage is first copied beside itself.
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
from ..config import Config
from ..config_file import load_config
from .checkpoints import DAMAGED, Checkpoint, checkpoint_folders, clear_leftovers, usable_checkpoint
from .folder import METRICS, ROLLOUTS
from .head import REFERENCE, flat_settings, is_free


@dataclass
class Log:
    """A JSONL file of a run, as far as it is intact. Its first `ends`[s] bytes hold the steps before s."""

    path: Path
    ends: list[int] = field(default_factory=lambda: [0])
    damage: str | None = None

    def hash_at(self, step: int) -> str:
        """SHA-256 of the part of the file that holds the steps before `step`."""
        return hashlib.sha256(self.path.read_bytes()[: self.ends[step]]).hexdigest()


@dataclass
class Resumption:
    """Where a run goes on. Only `prepare` changes files."""

    path: Path
    config: Config
    checkpoint: Checkpoint | None  # None: the run goes on from its first step
    ledger: LedgerFile
    logs: list[Log]
    history: list[dict[str, float]]  # the metrics of the steps that are done
    messages: list[str]  # a line for each file that is damaged or not used
    unusable: list[Path]  # checkpoints that new ones will replace

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return self.checkpoint.step if self.checkpoint else 0

    def check_head(self, head: Head) -> None:
        """Raise ValueError when configuration, data or first weights are not those in the run's ledger.

        head: of the ledger that the run would begin with now.
        """
        first_head = self.ledger.head
        if first_head is None:
            return
        for key in sorted(first_head.settings.keys() | head.settings.keys()):
            if (was := first_head.settings.get(key)) != (now := head.settings.get(key)):
                raise ValueError(f"resume: {self._altered(key, was, now)}")
        if first_head.data != head.data:
            raise ValueError(
                "resume: the training problems are not those of the run; put the task's data back as it was"
            )
        if first_head.weights != head.weights:
            raise ValueError(
                f"resume: the weights of {self.config.model} are not those that the run began with"
            )

    def _altered(self, key: str, was: Any, now: Any) -> str:
        """Why a run cannot go on whose setting `key` was altered."""
        if key == REFERENCE:
            place = self.config.loss.ref_model or self.config.model
            return (
                f"the weights of the reference, {place}, are {now}; the run began with {was}; "
                f"put them back, or set {REFERENCE} to where they are"
            )
        of_model = key.startswith("model.")
        file = "config.json of the run's first model" if of_model else self.path / "config.toml"
        return f"{key} is {now!r} in {file} and {was!r} in the ledger; the file was altered"

    def prepare(self) -> LedgerFile | None:
        """Cut the files back to `step`, and rename the unusable checkpoints.

        Returns the ledger as it is then; None if the old one has no head.
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
    """A name beside `path` for a damaged file that is kept."""
    return first_free(path.with_name(f"{path.name}{DAMAGED}{n or ''}") for n in count())


def find_resumption(path: Path, overrides: Mapping[str, Any]) -> Resumption:
    """Where the run in the folder `path` can go on.

    Raises ValueError for a folder without a run, or an override that decides bits.
    """
    config = run_config(path, overrides)
    ledger = read_ledger(path / LEDGER) if (path / LEDGER).exists() else LedgerFile(path / LEDGER)
    metrics = read_log(path / METRICS, 1)
    rollouts = read_log(path / ROLLOUTS, config.prompts * config.num_generations)
    files, logs = (ledger, metrics, rollouts), [metrics, rollouts]
    messages = [f"{file.damage}; going on from before it" for file in files if file.damage]
    checkpoint, unusable = None, []
    for folder in checkpoint_folders(path):
        checkpoint, refusal = _checkpoint_within(folder, ledger, logs, config)
        if checkpoint is not None:
            break
        messages.append(refusal)
        unusable.append(folder)
    step = checkpoint.step if checkpoint else 0
    if step > config.steps:
        raise ValueError(
            f"resume: steps ({config.steps}) must be at least {step}, the steps that {path} has done"
        )
    lines = metrics.path.read_bytes()[: metrics.ends[step]].splitlines() if step else []
    history = [_numbers(json.loads(line)) for line in lines]
    return Resumption(path, config, checkpoint, ledger, logs, history, messages, unusable)


def _checkpoint_within(
    folder: Path, ledger: LedgerFile, logs: list[Log], config: Config
) -> tuple[Checkpoint | None, str]:
    """The checkpoint and "", if ledger and logs reach its step and have its hashes; or None and why not."""
    checkpoint, damage = usable_checkpoint(folder, ledger, config)
    if checkpoint is None:
        return None, f"{damage}; not used"
    if checkpoint.step >= min(len(log.ends) for log in logs):
        return None, f"{folder} is ahead of {METRICS} or {ROLLOUTS}; not used"
    for log in logs:
        if log.hash_at(checkpoint.step) != checkpoint.logs.get(log.path.name):
            return None, (
                f"{log.path} was altered before step {checkpoint.step}, as its hash in {folder} shows; "
                "going on from before it"
            )
    return checkpoint, ""


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with its infinities. JSON has no number for them, so they were written as null."""
    return {key: float("inf") if value is None else value for key, value in line.items()}


def run_config(path: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration of the run in the folder `path`, with overrides.

    Raises ValueError for an override that decides bits, or a folder without a run.
    """
    file = path / "config.toml"
    if not file.exists():
        raise ValueError(f"run: {path} holds no run (no config.toml); start one with --run_dir {path}")
    was = load_config(str(file), None, {})
    now = load_config(str(file), None, overrides)
    before, after = flat_settings(was), flat_settings(now)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not (is_free(key, was) and is_free(key, now)):
            raise ValueError(
                f"run: {key} ({after.get(key)!r}, was {before.get(key)!r}) decides bits; in a run that "
                "exists only what decides none can change, such as workers, threads and micro_batch"
            )
    return now


def read_log(path: Path, lines_per_step: int) -> Log:
    """Read a log, and check of every line that it is JSON and of the step that belongs there."""
    log, end = Log(path), 0
    lines, _ = whole_lines(path.read_bytes() if path.exists() else b"")
    for number, raw in enumerate(lines, 1):
        try:
            fits = json.loads(raw)["step"] == (number - 1) // lines_per_step
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            log.damage = f"{path} line {number} is damaged"
            break
        end += len(raw)
        if number % lines_per_step == 0:
            log.ends.append(end)
    return log
