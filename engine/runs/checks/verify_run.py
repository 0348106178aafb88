"""`zerokl verify run`: is a run what it says it is?

The ledger's chain, the files of the checkpoints and every field of the summary are checked. Each step of
rollouts.jsonl is hashed again and compared with the ledger; prompts, rewards, advantages and metrics are
derived from its tokens. Some steps, drawn at random, and the last one are done again: every bit is compared
with the ledger and with the checkpoints, and every field with the logs.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....verify.compare_runs import run_ledger
from ....verify.difference import CheckResult
from ....verify.ledger import read_ledger
from ....verify.run_files import checkpoint_folders
from ...train.state import TrainState
from ..checkpoint_files import foreign_part, other_base, other_content
from ..evaluation import HeldOut
from ..folder import METRICS, ROLLOUTS
from ..held_out import BASE_REWARD, MEAN_REWARD
from ..intact_checkpoints import checked_checkpoint, unchecked
from ..ledger_head import altered_free_setting
from ..logs import Log, read_log
from ..resume import derived_summary, run_config
from ..summary import numbers, read_summary, wrong_fields
from .checked_run import CheckedRun, fault_in
from .derived_steps import derived_fault, derives_advantages, derives_rewards
from .logged_steps import LoggedStep, metrics_fault, read_step, rollouts_fault, texts_fault
from .replayed_steps import check_replays, drawn_steps, evaluations_of
from .replayer import Replayer


def verify_run(path: Path, replays: int, seed: int, overrides: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Check a run, and do `replays` of its steps again, drawn at random with `seed`, and the last one.

    With 0 no step is done again. Yields each result when it is known. Raises ValueError for a folder without
    a run, for an override that decides bits, and for a number out of range.
    """
    if replays < 0:
        raise ValueError(f"verify run: --replays ({replays}) must not be negative")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"verify run: --draw ({seed}) must lie in 0 to 2^32 - 1")
    config = run_config(path, overrides)
    ledger = read_ledger(run_ledger(path))
    if ledger.damage or ledger.head is None:
        yield CheckResult.judged("ledger", ledger.damage or f"{ledger.path} has no whole head")
        return
    run = CheckedRun(path, config, ledger)
    yield _ledger(run)
    yield _configuration(run)
    yield from _checkpoints(run)
    for check in (_metrics, _rollouts, _summary):
        yield check(run)
    try:
        replayer = Replayer(path, overrides, [] if config.samples_older_weights else run.checkpoints)
    except ValueError as error:
        yield CheckResult.judged("replay", error)
        return
    with replayer:
        yield from _files(run, replayer.model)
        words = f"those of the tokens, in {len(run.rollouts)} steps"
        yield _each_step(run, "texts", lambda step, logged: texts_fault(logged, replayer.state), words)
        yield _derived(run, replayer.state)
        held_out = evaluations_of(run, replayer)
        yield _evaluations(run, held_out)
        yield from check_replays(run, replayer, held_out, drawn_steps(len(ledger.lines), replays, seed))


def _ledger(run: CheckedRun) -> CheckResult:
    chain = f"{len(run.ledger.lines)} steps, chain unbroken"
    if run.ledger.torn:
        chain += ", and a torn line after them"
    return CheckResult.judged("ledger", chain if run.ledger.torn and run.ended else None, chain)


def _configuration(run: CheckedRun) -> CheckResult:
    """config.toml beside the free settings that the ledger notes; replays compare those that decide bits."""
    altered = altered_free_setting(run_config(run.path, {}), run.ledger)
    return CheckResult.judged("config.toml", altered, "the settings of the run's last start")


def _checkpoints(run: CheckedRun) -> Iterator[CheckResult]:
    """Each checkpoint. Intact ones are added to the run."""
    for folder in reversed(checkpoint_folders(run.path)):
        checkpoint, damage = checked_checkpoint(folder, run.ledger)
        damage, bits = damage or "cannot be read", ", and the ledger's bits"
        if checkpoint:
            run.checkpoints.insert(0, checkpoint)
            damage = fault_in(lambda c=checkpoint: foreign_part(c, run.ledger.head))
            bits = "; the ledger has not all of its bits" if unchecked(checkpoint, run.ledger) else bits
        words = f"every hash right, no foreign file, its place in the chain{bits}"
        yield CheckResult.judged(folder.name, damage, words)
    last = f"step-{len(run.ledger.lines):06d}"
    if run.ended and not (run.path / "checkpoints" / last).exists():
        yield CheckResult.judged("checkpoints", f"{last} is missing, which a run writes at its end")


def _log_fault(log: Log, run: CheckedRun) -> str | None:
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


def _metrics(run: CheckedRun) -> CheckResult:
    """metrics.jsonl as a file; its values are compared with the rollouts and with replays."""
    log = read_log(run.path / METRICS, 1)
    run.metrics.update({step: line for step, (line,) in log.steps()})
    return CheckResult.judged(METRICS, _log_fault(log, run), f"{log.stop} steps")


def _rollouts(run: CheckedRun) -> CheckResult:
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
    return CheckResult.judged(ROLLOUTS, fault, f"{log.stop} steps, with the ledger's hashes")


def _summary(run: CheckedRun) -> CheckResult:
    """Every field of summary.json, derived again."""
    words = (
        "every field but the seconds follows from the run" if run.ended else "none: the run is not finished"
    )
    return CheckResult.judged("summary", fault_in(lambda: _summary_fault(run)), words)


def _summary_fault(run: CheckedRun) -> str | None:
    steps, summary = len(run.ledger.lines), read_summary(run.path)
    if summary is None:
        return None
    if summary.fingerprint != run.ledger.chain:
        return "its fingerprint is not the ledger's last chain value"
    if steps != run.config.steps:
        return f"of a run of {run.config.steps} steps, of which the ledger holds {steps}"
    last = next((c for c in run.checkpoints if c.step == steps), None)
    if last is None:
        return f"cannot be derived: no intact checkpoint of step {steps}"
    history = [numbers(line) for line in run.metrics.values()]
    return next(iter(wrong_fields(summary, derived_summary(run.ledger, history, last))), None)


def _files(run: CheckedRun, model: Path) -> Iterator[CheckResult]:
    """Each checkpoint with a small file that does not follow from the run's first model, in `model`."""
    made_here = run.config.model.startswith("init:")
    places = {str(environment.get("process.model")) for _, environment in run.ledger.starts}
    places |= {str(model), str(model.absolute())}
    for checkpoint in run.checkpoints:
        name = checkpoint.folder.name
        if fault := fault_in(lambda c=checkpoint: other_content(c, model, run.ledger.head)):
            yield CheckResult.judged(name, fault)
        elif base := other_base(checkpoint, places):
            words = f"the base of its adapter, which it calls {base}, and the run has {model}"
            # A base that was made in the run's folder has moved with it.
            note, fault = CheckResult.note(name, f"not checked: {words}"), f"is not the run's: {words}"
            yield note if made_here else CheckResult.judged(name, fault)


def _each_step(
    run: CheckedRun, what: str, fault_of_step: Callable[[int, LoggedStep], object], words: str
) -> CheckResult:
    """A check of every step of rollouts.jsonl: the first fault, with its step."""
    faults = ((step, fault_of_step(step, logged)) for step, logged in run.rollouts.items())
    first = next((f"{ROLLOUTS}, step {step}: {fault}" for step, fault in faults if fault), None)
    return CheckResult.judged(what, first, words)


def _derived(run: CheckedRun, state: TrainState) -> CheckResult:
    """What every step of rollouts.jsonl has beside tokens and their numbers, derived from its tokens."""
    names = {"rewards": derives_rewards(state), "advantages": derives_advantages(run.config)}
    derived, left = ([name for name, is_derived in names.items() if is_derived == x] for x in (True, False))
    words = [f"{' and '.join(derived)}: those of the tokens, in {len(run.rollouts)} steps"] * bool(derived)
    words += [f"{' and '.join(left)} are compared in the steps that are done again"] * bool(left)
    result = _each_step(
        run, "rewards", lambda step, logged: derived_fault(step, logged, state), "; ".join(words)
    )
    return result if derived or not result.holds else CheckResult.note("rewards", result.result)


def _evaluations(run: CheckedRun, held_out: Callable[[int], HeldOut]) -> CheckResult:
    """Whether metrics.jsonl has the held-out rewards where the settings ask for them."""
    count = 0
    for step, metrics in run.metrics.items():
        wanted, present = held_out(step).due(step), {BASE_REWARD, MEAN_REWARD} & metrics.keys()
        if wrong := min(wanted ^ present, default=None):
            words = "lacks" if wrong in wanted else "has no place for"
            return CheckResult.judged("evaluations", f"step {step} {words} {wrong} in {METRICS}")
        count += MEAN_REWARD in wanted
    if count:
        return CheckResult.judged("evaluations", None, f"{count}, wherever the settings ask for one")
    words = "none: evaluation is off, or the task has no held-out problems; no hash says that it always was"
    return CheckResult.note("evaluations", words)
