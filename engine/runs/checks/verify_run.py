"""`zerokl verify run`: is a run what it says it is?

The ledger's chain, the files of the checkpoints and every field of the summary are checked. Each step of
rollouts.jsonl is hashed again and compared with the ledger; prompts, rewards, advantages and metrics are
derived from its tokens. Some steps, drawn at random, and the last one are done again: every bit is compared
with the ledger and with the checkpoints, and every field with the logs.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....files.reading import shown
from ....kernels.philox import Stream, permutation
from ....verify.divergence import Divergence, run_ledger
from ....verify.ledger import LedgerFile, Line, read_ledger
from ...config.run_config import Config
from ...display.progress import duration
from ...train.state import StepRecord, TrainState
from ..checkpoint_files import foreign_part, other_base, other_content, other_state
from ..checkpoints import Checkpoint, checked_checkpoint, checkpoint_folders, unchecked
from ..evaluation import HeldOut
from ..folder import METRICS, ROLLOUTS, finite
from ..held_out import BASE_REWARD, MEAN_REWARD
from ..ledger_head import altered_free_setting
from ..logs import Log, read_log
from ..resume import derived_summary, run_config
from ..rollout_lines import rollout_line
from ..summary import numbers, read_summary, wrong_fields
from .derived_steps import derived_fault, derives_advantages, derives_rewards
from .logged_steps import LoggedStep, metrics_fault, read_step, rollouts_fault, texts_fault
from .replay import Replayer

# The metrics whose sum is the time of a step.
_STEP_SECONDS = ("time/sample_s", "time/train_s")
# Metrics that are not the same when a step is done again.
_MEASURED = ("time/", "perf/", "pool/")


@dataclass(frozen=True)
class Finding:
    """One line of `zerokl verify run`."""

    what: str
    result: str
    holds: bool
    checked: bool = True  # False: a note, which says something and checks nothing
    divergence: Divergence | None = None  # of a step that was done again
    is_open: bool = False  # neither confirmed nor refuted; holds is True

    @property
    def mark(self) -> str:
        """The word in front of the line: ok, FAIL, open or note."""
        if not self.holds:
            return "FAIL"
        return "open" if self.is_open else "ok" if self.checked else "note"


@dataclass(frozen=True)
class _Run:
    """What the checks share: the run's files. Each check adds those that it finds intact."""

    path: Path
    config: Config
    ledger: LedgerFile
    checkpoints: list[Checkpoint]  # intact, newest first
    metrics: dict[int, dict[str, Any]]  # by step
    rollouts: dict[int, LoggedStep]  # by step

    @property
    def ended(self) -> bool:
        """Whether the run has a summary, which it writes at its end."""
        return (self.path / "summary.json").exists()


def verify_run(path: Path, replays: int, seed: int, overrides: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a run, and do `replays` of its steps again, drawn at random with `seed`, and the last one.

    With 0 no step is done again. Yields each finding when it is known. Raises ValueError for a folder without
    a run, for an override that decides bits, and for a number out of range.
    """
    if replays < 0:
        raise ValueError(f"verify run: --replays ({replays}) must not be negative")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"verify run: --draw ({seed}) must lie in 0 to 2^32 - 1")
    config = run_config(path, overrides)
    ledger = read_ledger(run_ledger(path))
    if ledger.damage or ledger.head is None:
        yield Finding("ledger", ledger.damage or f"{ledger.path} has no whole head", False)
        return
    run = _Run(path, config, ledger, [], {}, {})
    yield _ledger(run)
    yield _configuration(run)
    yield from _checkpoints(run)
    for check in (_metrics, _rollouts, _summary):
        yield check(run)
    try:
        replayer = Replayer(path, overrides, [] if config.samples_older_weights else run.checkpoints)
    except ValueError as error:
        yield Finding("replay", str(error), False)
        return
    with replayer:
        yield from _files(run, replayer.model)
        yield _texts(run, replayer.state)
        yield _derived(run, replayer.state)
        held_out = _held_out(run, replayer)
        yield _evaluations(run, held_out)
        yield from _replays(run, replayer, held_out, drawn_steps(len(ledger.lines), replays, seed))


def _ledger(run: _Run) -> Finding:
    chain = f"{len(run.ledger.lines)} steps, chain unbroken"
    if run.ledger.torn:
        chain += ", and a torn line after them"
    return Finding("ledger", chain, not (run.ledger.torn and run.ended))


def _configuration(run: _Run) -> Finding:
    """config.toml beside the free settings that the ledger notes; replays compare those that decide bits."""
    altered = altered_free_setting(run_config(run.path, {}), run.ledger)
    return Finding("config.toml", altered or "the settings of the run's last start", not altered)


def _checkpoints(run: _Run) -> Iterator[Finding]:
    """Each checkpoint. Intact ones are added to the run."""
    for folder in reversed(checkpoint_folders(run.path)):
        checkpoint, damage = checked_checkpoint(folder, run.ledger)
        bits = ", and the ledger's bits"
        if checkpoint:
            run.checkpoints.insert(0, checkpoint)
            damage = _fault(lambda c=checkpoint: foreign_part(c, run.ledger.head))
            bits = "; the ledger has not all of its bits" if unchecked(checkpoint, run.ledger) else bits
        result = damage or f"every hash right, no foreign file, its place in the chain{bits}"
        yield Finding(folder.name, result, not damage)
    steps = len(run.ledger.lines)
    if run.ended and not (run.path / "checkpoints" / f"step-{steps:06d}").exists():
        yield Finding("checkpoints", f"step-{steps:06d} is missing, which a run writes at its end", False)


def _fault(check: Callable[[], str | None]) -> str | None:
    """What a check finds, or why it could not read what it checks."""
    try:
        return check()
    except (OSError, ValueError) as error:
        return str(error)


def _log_fault(log: Log, run: _Run) -> str | None:
    """What is wrong with a log: a damaged line, lost steps, or another hash than the checkpoint's."""
    recorded = len(run.ledger.lines)
    if log.damage:
        return log.damage
    newest = run.checkpoints[0] if run.checkpoints else None
    if newest and newest.step > log.stop:
        return f"ends before step {newest.step}, of which there is a checkpoint"
    if newest and log.first < newest.step and log.hash_at(newest.step) != newest.logs.get(log.path.name):
        return f"was altered before step {newest.step}, as its hash in {newest.folder.name} shows"
    if log.first:
        return f"begins at step {log.first}: the steps before are lost"
    if log.stop > recorded or (run.ended and log.stop < recorded):
        return f"holds {log.stop} steps, the ledger {recorded}"
    return None


def _metrics(run: _Run) -> Finding:
    """metrics.jsonl as a file; its values are compared with the rollouts and with replays."""
    log = read_log(run.path / METRICS, 1)
    run.metrics.update({step: line for step, (line,) in log.steps()})
    fault = _log_fault(log, run)
    return Finding(METRICS, fault or f"{log.stop} steps", not fault)


def _rollouts(run: _Run) -> Finding:
    """Every step of rollouts.jsonl beside the ledger, and the metrics that follow from it."""
    cfg = run.config
    G, cuts = cfg.rollouts_per_prompt, cfg.loss.cuts(cfg.num_generations)
    log = read_log(run.path / ROLLOUTS, cfg.prompts * G, may_begin_later=True)
    fault = _log_fault(log, run)
    for step, lines in log.steps():
        if step >= len(run.ledger.lines):
            break
        try:
            logged = run.rollouts[step] = read_step(lines, G, cuts)
        except ValueError as error:
            fault = fault or f"step {step}: {error}"
            continue
        line, metrics = run.ledger.lines[step], run.metrics.get(step)
        fault = fault or rollouts_fault(logged, line)
        if metrics and not fault and (wrong := metrics_fault(logged, line, metrics, cfg.max_staleness > 0)):
            fault = f"step {step}: {wrong} in {METRICS}, as these rollouts show"
    return Finding(ROLLOUTS, fault or f"{log.stop} steps, with the ledger's hashes", not fault)


def _files(run: _Run, model: Path) -> Iterator[Finding]:
    """Each checkpoint with a small file that does not follow from the run's first model, in `model`."""
    made_here = run.config.model.startswith("init:")
    places = {str(environment.get("process.model")) for _, environment in run.ledger.starts}
    places |= {str(model), str(model.absolute())}
    for checkpoint in run.checkpoints:
        if fault := _fault(lambda c=checkpoint: other_content(c, model, run.ledger.head)):
            yield Finding(checkpoint.folder.name, fault, False)
        elif base := other_base(checkpoint, places):
            words = f"the base of its adapter, which it calls {base}, and the run has {model}"
            # A base that was made in the run's folder has moved with it.
            words = f"not checked: {words}" if made_here else f"is not the run's: {words}"
            yield Finding(checkpoint.folder.name, words, made_here, checked=False)


def _texts(run: _Run, state: TrainState) -> Finding:
    """What rollouts.jsonl tells beside the quantities of the ledger: texts, problems, ends of completions."""
    for step, logged in run.rollouts.items():
        if fault := texts_fault(logged, state):
            return Finding("texts", f"{ROLLOUTS}, step {step}: {fault}", False)
    return Finding("texts", f"those of the tokens, in {len(run.rollouts)} steps", True)


def _summary(run: _Run) -> Finding:
    """Every field of summary.json, derived again."""
    steps = len(run.ledger.lines)
    try:
        summary = read_summary(run.path)
        if summary is None:
            return Finding("summary", "none: the run is not finished", True)
        if summary.fingerprint != run.ledger.chain:
            return Finding("summary", "its fingerprint is not the ledger's last chain value", False)
        if steps != run.config.steps:
            what = f"of a run of {run.config.steps} steps, of which the ledger holds {steps}"
            return Finding("summary", what, False)
        last = next((c for c in run.checkpoints if c.step == steps), None)
        if last is None:
            return Finding("summary", f"cannot be derived: no intact checkpoint of step {steps}", False)
        history = [numbers(line) for line in run.metrics.values()]
        wrong = wrong_fields(summary, derived_summary(run.ledger, history, last))
    except ValueError as error:
        return Finding("summary", str(error), False)
    return Finding(
        "summary", wrong[0] if wrong else "every field but the seconds follows from the run", not wrong
    )


def _derived(run: _Run, state: TrainState) -> Finding:
    """What every step of rollouts.jsonl has beside tokens and their numbers, derived from its tokens."""
    for step, logged in run.rollouts.items():
        if fault := derived_fault(step, logged, state):
            return Finding("rewards", f"{ROLLOUTS}, step {step}: {fault}", False)
    names = {"rewards": derives_rewards(state), "advantages": derives_advantages(run.config)}
    derived, left = ([name for name, is_derived in names.items() if is_derived == x] for x in (True, False))
    words = f"{' and '.join(derived)}: those of the tokens, in {len(run.rollouts)} steps" if derived else ""
    words += "; " if derived and left else ""
    words += f"{' and '.join(left)} are compared in the steps that are done again" if left else ""
    return Finding("rewards", words, True, checked=bool(derived))


def _evaluations(run: _Run, held_out: Callable[[int], HeldOut]) -> Finding:
    """Whether metrics.jsonl has the held-out rewards where the settings ask for them."""
    count = 0
    for step, metrics in run.metrics.items():
        wanted, present = held_out(step).due(step), {BASE_REWARD, MEAN_REWARD} & metrics.keys()
        if wrong := min(wanted ^ present, default=None):
            words = "lacks" if wrong in wanted else "has no place for"
            return Finding("evaluations", f"step {step} {words} {wrong} in {METRICS}", False)
        count += MEAN_REWARD in wanted
    if count:
        return Finding("evaluations", f"{count}, wherever the settings ask for one", True)
    words = "none: evaluation is off, or the task has no held-out problems; no hash says that it always was"
    return Finding("evaluations", words, True, checked=False)


def drawn_steps(recorded: int, n: int, seed: int) -> list[int]:
    """Up to n of the recorded steps, drawn at random with `seed`, and the last one, ascending; none for 0."""
    drawn = permutation(recorded, seed, Stream.ORDER, 0)[:n].tolist() if recorded else []
    return sorted({*drawn, recorded - 1}) if drawn else []


def _replays(
    run: _Run, replayer: Replayer, held_out: Callable[[int], HeldOut], drawn: Sequence[int]
) -> Iterator[Finding]:
    """Steps of the run, done again in ascending order, and the checkpoints that are reached beside them."""
    left = {c.step: c for c in reversed(run.checkpoints) if unchecked(c, run.ledger)}
    # A run that was cut may have gone on after its newest checkpoint.
    newest = {max(left) - 1} if left and max(left) == run.checkpoints[0].step and max(left) else set()
    steps = sorted({*drawn, *newest}) if drawn else []
    if steps:
        # No step is done yet, so this evaluates the model that the run began with.
        base = held_out(0).base_metrics() if steps[0] == 0 else {}
        yield Finding("replays", _plan(run, steps, replayer.passes(steps)), True, checked=False)
    else:
        yield Finding("replays", "none: no step is done again, nor is the last one", True, checked=False)
    for step in steps:
        faults: list[str] = []
        reached: list[Finding] = []

        def compare(
            record: StepRecord,
            step: int = step,
            faults: list[str] = faults,
            reached: list[Finding] = reached,
        ) -> None:
            if record.metrics["step"] == step:
                metrics = record.metrics | (base if step == 0 else {}) | held_out(step).metrics()[0]
                again = replayer.last_line
                faults += filter(None, [_logged_fault(run, replace(record, metrics=metrics), again)])
            if checkpoint := left.pop(replayer.state.step, None):
                reached.append(_reached(run, checkpoint, replayer.state))

        replay = replayer.replay(step, after=compare)
        what, result = f"replay of step {step}", faults[0] if faults else "the same bits"
        if replay.divergence:
            yield Finding(what, f"differs at {replay.divergence}", False, divergence=replay.divergence)
        else:
            yield Finding(what, result, not faults)
        yield from reached
    for checkpoint in left.values():
        words = f"not checked: {', '.join(unchecked(checkpoint, run.ledger))}"
        yield Finding(checkpoint.folder.name, words, True, checked=False)


def _reached(run: _Run, checkpoint: Checkpoint, state: TrainState) -> Finding:
    """A checkpoint of whose bits the ledger lacks a hash, beside the state after its steps."""
    name, parts = checkpoint.folder.name, ", ".join(unchecked(checkpoint, run.ledger))
    try:
        different = other_state(checkpoint, run.ledger.head, state)
    except (OSError, ValueError) as error:
        return Finding(name, str(error), False)
    if different:
        words = f"its {different} are not those of step {checkpoint.step - 1}, done again"
        where = Divergence(checkpoint.step - 1, different)
        return Finding(name, words, False, divergence=where)
    return Finding(name, f"{parts}: those of step {checkpoint.step - 1}, done again", True)


def _plan(run: _Run, steps: Sequence[int], passes: Sequence[tuple[int, int]]) -> str:
    """Which steps are compared, what must be done again for it, and how long that takes."""
    again = [step for first, last in passes for step in range(first, last + 1)]
    seconds = [_seconds(run.metrics.get(step, {}), name) for step in again for name in _STEP_SECONDS]
    ranges = " and ".join(f"{first} to {last}" for first, last in passes)
    return (
        f"{', '.join(map(str, steps))}, drawn at random, and the last; to reach them, steps {ranges} are "
        f"done again, {duration(sum(seconds))} at the run's own speed"
    )


def _seconds(metrics: Mapping[str, Any], name: str) -> float:
    """A time of a step, s; 0 where metrics.jsonl, which may be damaged, has none."""
    value = metrics.get(name)
    return value if isinstance(value, float) and 0 <= value < math.inf else 0.0


def _held_out(run: _Run, replayer: Replayer) -> Callable[[int], HeldOut]:
    """Step -> the evaluation that the run had there. A run that goes on may be evaluated in another way."""

    def evaluated(environment: Mapping[str, Any]) -> HeldOut:
        noted = {key.removeprefix("process."): value for key, value in environment.items()}
        own = run.config.evaluation
        values = {name: noted.get(f"evaluation.{name}", value) for name, value in own.model_dump().items()}
        changes = {"steps": noted.get("steps", run.config.steps), "evaluation": own.model_copy(update=values)}
        return HeldOut(replayer.state, replayer.task, run.config.model_copy(update=changes))

    starts = [(first, evaluated(environment)) for first, environment in reversed(run.ledger.starts)]
    return lambda step: next(held_out for first, held_out in starts if first <= step)


def _logged_fault(run: _Run, record: StepRecord, again: Line) -> str | None:
    """The first field of logs or ledger that is not the one of the step, done again.

    record: with the metrics of the step's evaluations. again: its line of the ledger.
    """
    step, (P, G) = record.metrics["step"], record.episodes.rewards.shape
    if (logged := run.rollouts.get(step)) is not None:
        lines = [rollout_line(record, p, g, G) for p in range(P) for g in range(G)]
        for was, now in zip(logged.lines, lines, strict=True):
            if name := _different(was, now, lambda name: True):
                place = f"prompt {now['prompt']}, sample {now['sample']}"
                return f"{ROLLOUTS} has another {name} at {place}: {shown(was.get(name))}"
    if (line := run.metrics.get(step)) is not None:
        metrics = finite(record.metrics | record.notes)
        if name := _different(line, metrics, lambda name: not name.startswith(_MEASURED)):
            return f"{METRICS} has {name} = {shown(line.get(name))}, the step has {shown(metrics.get(name))}"
    if name := _different(run.ledger.lines[step].notes, again.notes, lambda name: True):
        return f"the ledger notes another {name}: {shown(run.ledger.lines[step].notes.get(name))}"
    return None


def _different(was: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> str | None:
    """The first name that counts whose values differ, as JSON."""
    for name in [*now, *(name for name in was if name not in now)]:
        if counts(name) and (
            (name in was) != (name in now) or json.dumps(was[name]) != json.dumps(now[name])
        ):
            return name
    return None
