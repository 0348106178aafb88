"""`zerokl train --resume`: where an interrupted run can go on, to the bit.

A run goes on from its newest intact checkpoint whose step the ledger, the metrics and the rollouts reach.
These three files are then cut back to this step. A message names each damaged file. A file that is cut
because of damage is first copied beside itself. No step needs the rollouts of earlier steps: where they are
missing, the run goes on without them.

Nothing changes before all that is needed is known to be there. A run that is done is left as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ...files.inputs import read_bytes
from ...files.reading import parse_json
from ...files.writing import first_free, write_whole
from ...model.peft import checkpoint_config
from ...model.weights import fingerprint
from ...verify.ledger import LEDGER, Head, LedgerFile, read_ledger
from ...verify.run_files import checkpoint_folders
from ..config.config_file import file_keys, load_config
from ..config.run_config import Config
from .folder import METRICS, ROLLOUTS, check_shape
from .intact_checkpoints import DAMAGED, clear_leftovers, usable_checkpoint
from .ledger_head import REFERENCE, binding, flat_settings, frozen_name, is_free, run_layout
from .logs import Log, read_log
from .summary import SUMMARY, Summary, numbers, read_summary, summarise, wrong_fields
from .trainer_state import Checkpoint, read_trained


@dataclass(frozen=True)
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
    summary: Summary | None = None  # of a run that is done: there is nothing left to do
    wrong_summary: bool = False  # the run has a summary that is not its own

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
        self._check_settings(head.settings, first_head.settings.keys() | head.settings.keys())
        if first_head.data != head.data:
            raise ValueError(
                "resume: the training problems are not those of the run; put the task's data back as it was"
            )
        if first_head.weights != head.weights:
            raise ValueError(
                f"resume: the weights of {self.config.model} are not those that the run began with"
            )

    def check_config(self) -> None:
        """Raise ValueError when a setting that decides bits is not the one in the run's ledger."""
        now = binding(self.config)
        self._check_settings(now, now.keys())

    def _check_settings(self, now: Mapping[str, Any], keys: Iterable[str]) -> None:
        head = self.ledger.head
        for key in sorted(keys) if head else ():
            if (was := head.settings.get(key)) != now.get(key):
                raise ValueError(f"resume: {self._altered(key, was, now.get(key))}")

    def _altered(self, key: str, was: Any, now: Any) -> str:
        """Why a run cannot go on whose setting `key` was altered."""
        if key == REFERENCE:
            place = self.config.loss.ref_model or self.config.model
            return (
                f"the weights of the reference, {place}, are {now}; the run began with {was}; "
                f"put them back, or set {REFERENCE} to where they are"
            )
        if (name := frozen_name(key)) is not None:
            return self._altered_frozen(name, was, now)
        is_model_key = key.startswith("model.")
        file = "config.json of the run's first model" if is_model_key else self.path / "config.toml"
        return f"{key} is {now!r} in {file} and {was!r} in the ledger; the file was altered"

    def _altered_frozen(self, name: str, was: str | None, now: str | None) -> str:
        """Why a run cannot go on whose frozen weight `name` was altered. was, now: its hashes, if frozen."""
        if was and now:
            return (
                f"the frozen weight {name} of {self.config.model} is {now}; the run began with {was}; "
                "put it back"
            )
        states = ["frozen" if frozen else "trained" for frozen in (now, was)]
        return f"{name} is {states[0]} now, and was {states[1]} in the run; set frozen as it was"

    def ends(self) -> dict[Path, int]:
        """The bytes of the ledger and of each log up to `step`."""
        ends = {log.path: log.end(self.step) for log in self.logs}
        return ends | {self.ledger.path: self.ledger.ends[self.step] if self.ledger.head else 0}

    def prepare(self) -> LedgerFile | None:
        """Cut the files back to `step`, and rename the unusable checkpoints.

        Returns the ledger as it is then; None if the old one has no head.
        """
        clear_leftovers(self.path)
        for folder in self.unusable:
            folder.rename(_free_name(folder))
        for path, end in self.ends().items():
            content = read_bytes(path) if path.exists() else b""
            if self.messages and len(content) > end:
                write_whole(_free_name(path), content)
            if len(content) != end:
                write_whole(path, content[:end])
        summary = self.path / SUMMARY
        if self.wrong_summary:
            summary.rename(_free_name(summary))
        summary.unlink(missing_ok=True)
        return read_ledger(self.ledger.path).whole() if self.ledger.head else None


def _free_name(path: Path) -> Path:
    """A name beside `path` for a damaged file that is kept."""
    return first_free(path.with_name(f"{path.name}{DAMAGED}{n or ''}") for n in count())


def find_resumption(path: Path, overrides: Mapping[str, Any]) -> Resumption:
    """Where the run in the folder `path` can go on.

    Raises ValueError for a folder without a run, for a file of it that is no file, or an override that
    decides bits.
    """
    config = run_config(path, overrides)
    check_shape(path, to_write=True)
    ledger = read_ledger(path / LEDGER) if (path / LEDGER).exists() else LedgerFile(path / LEDGER)
    metrics = read_log(path / METRICS, 1)
    rollouts = read_log(path / ROLLOUTS, config.prompts * config.rollouts_per_prompt, may_begin_later=True)
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
    if step and rollouts.lost:
        messages.append(f"{rollouts.path} is missing; from now on it begins at step {step}")
    lines = read_bytes(metrics.path)[: metrics.end(step)].splitlines() if step else []
    history = [numbers(parse_json(line, non_finite=True)) for line in lines]
    resumption = Resumption(path, config, checkpoint, ledger, logs, history, messages, unusable)
    resumption.check_config()
    return _with_summary(resumption) if step == config.steps and not unusable else resumption


def _with_summary(resumption: Resumption) -> Resumption:
    """Of a run that has done all its steps: with its summary, if the run has its files as it left them."""
    path, checkpoint = resumption.path, resumption.checkpoint
    assert checkpoint is not None
    try:
        summary = read_summary(path)
        wrong = summary and wrong_fields(
            summary, derived_summary(resumption.ledger, resumption.history, checkpoint)
        )
    except ValueError as error:
        summary, wrong = None, [str(error)]
    if wrong:
        messages = [*resumption.messages, f"{path / SUMMARY}: {wrong[0]}; it is written again"]
        return replace(resumption, messages=messages, wrong_summary=True)
    if all((file.stat().st_size if file.exists() else 0) == end for file, end in resumption.ends().items()):
        return replace(resumption, summary=summary)
    return resumption


def derived_summary(ledger: LedgerFile, history: list[dict[str, Any]], last: Checkpoint) -> Summary:
    """What summary.json must hold. history: the metrics of all steps. last: the checkpoint after them.

    Raises ValueError for metrics that are no metrics of a step, and for weights that cannot be read.
    """
    layout = run_layout(checkpoint_config(last.folder), ledger.head)
    weights = fingerprint(layout, read_trained(last.folder, layout))
    try:
        return summarise(history, ledger.chain, weights, 0.0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{METRICS} lacks what a summary needs ({type(error).__name__}: {error})") from None


def _checkpoint_within(
    folder: Path, ledger: LedgerFile, logs: list[Log], config: Config
) -> tuple[Checkpoint | None, str]:
    """The checkpoint and "", if ledger and logs reach its step and have its hashes; or None and why not."""
    checkpoint, damage = usable_checkpoint(folder, ledger, config)
    if checkpoint is None:
        return None, f"{damage}; not used"
    logs = [log for log in logs if not _needs_nothing(log, checkpoint.step)]
    for log in logs:
        if checkpoint.step > log.stop:
            return None, f"{folder} is ahead of {log.path.name}; not used"
        if log.hash_at(checkpoint.step) != checkpoint.logs.get(log.path.name):
            return None, (
                f"{log.path} was altered before step {checkpoint.step}, as its hash in {folder} shows; "
                "going on from before it"
            )
    return checkpoint, ""


def _needs_nothing(log: Log, step: int) -> bool:
    """Whether a log holds nothing of the steps before `step`, and none of them needs it."""
    return log.path.name == ROLLOUTS and (log.lost or (log.first >= step and not log.damage))


def _check_sampler(config: Config, path: Path) -> None:
    """Raise ValueError where config.toml names vLLM as it comes, and the run did not sample with it.

    The ledger chains the names of samplers that do not draw the native sampler's tokens.
    """
    if config.sampler != "vllm" or not (path / LEDGER).exists():
        return
    head = read_ledger(path / LEDGER).head
    if head and "sampler" not in head.settings:
        raise ValueError(
            f'run: sampler ("vllm") in {path / "config.toml"} is vLLM as it comes now, and this run sampled '
            'with zerokl\'s decoder inside vLLM; set it to "vllm-zerokl" there'
        )


def run_config(path: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration of the run in the folder `path`, with overrides.

    Raises ValueError for an override that decides bits, for a folder without a run, and for one with a file
    that is no file.
    """
    check_shape(path, to_write=False)
    file = path / "config.toml"
    if not file.exists():
        raise ValueError(f"run: {path} holds no run (no config.toml); start one with --run_dir {path}")
    was = load_config(str(file), None, {})
    _check_sampler(was, path)
    present = file_keys(str(file))
    lacking = [key for key in flat_settings(was) if key not in present and not is_free(key, was)]
    if lacking:
        raise ValueError(
            f"run: {file} lacks {lacking[0]}, which every run writes there; the file was altered: put it back"
        )
    now = load_config(str(file), None, overrides)
    before, after = flat_settings(was), flat_settings(now)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not (is_free(key, was) and is_free(key, now)):
            raise ValueError(
                f"run: {key} ({after.get(key)!r}, was {before.get(key)!r}) decides bits; in a run that "
                "exists only what decides none can change, such as workers, threads and micro_batch"
            )
    return now
