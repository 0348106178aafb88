"""The steps of a run that `zerokl verify run` does again, beside its ledger, its logs and its checkpoints."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....kernels.philox import Stream, permutation
from ....verify.difference import CheckResult, Difference, first_difference, same_json
from ...display.progress import duration
from ...train.state import StepRecord, TrainState
from ..checkpoint_files import other_state
from ..evaluation import HeldOut
from ..folder import METRICS, ROLLOUTS, finite
from ..intact_checkpoints import Checkpoint, unchecked
from ..rollout_lines import rollout_line
from .checked_run import CheckedRun, fault_in
from .replayer import Replayer

# The metrics whose sum is the time of a step.
_STEP_SECONDS = ("time/sample_s", "time/train_s")
# Metrics that are not the same when a step is done again.
_MEASURED = ("time/", "perf/", "pool/")


def drawn_steps(recorded: int, n: int, seed: int) -> list[int]:
    """Up to n of the recorded steps, drawn at random with `seed`, and the last one, ascending; none for 0."""
    drawn = permutation(recorded, seed, Stream.ORDER, 0)[:n].tolist() if recorded else []
    return sorted({*drawn, recorded - 1}) if drawn else []


def check_replays(
    run: CheckedRun, replayer: Replayer, held_out: Callable[[int], HeldOut], drawn: Sequence[int]
) -> Iterator[CheckResult]:
    """Steps of the run, done again in ascending order, and the checkpoints that are reached beside them."""
    left = {c.step: c for c in reversed(run.checkpoints) if unchecked(c, run.ledger)}
    # A run that was cut may have gone on after its newest checkpoint.
    newest = {max(left) - 1} if left and max(left) == run.checkpoints[0].step and max(left) else set()
    steps = sorted({*drawn, *newest}) if drawn else []
    if not steps:
        yield CheckResult.note("replays", "none: no step is done again, nor is the last one")
    else:
        # No step is done yet, so this evaluates the model that the run began with.
        base = held_out(0).base_metrics() if steps[0] == 0 else {}
        yield CheckResult.note("replays", _plan(run, steps, replayer.passes(steps)))
    for step in steps:
        yield from _replayed(run, replayer, step, held_out(step), base if step == 0 else {}, left)
    for checkpoint in left.values():
        words = f"not checked: {', '.join(unchecked(checkpoint, run.ledger))}"
        yield CheckResult.note(checkpoint.folder.name, words)


def _replayed(
    run: CheckedRun,
    replayer: Replayer,
    step: int,
    held_out: HeldOut,
    base: Mapping[str, Any],
    left: dict[int, Checkpoint],
) -> Iterator[CheckResult]:
    """One step, done again, and the checkpoints of `left` that are reached on the way; those leave it."""
    fault, reached = None, []

    def compare(record: StepRecord) -> None:
        nonlocal fault
        if record.metrics["step"] == step:
            record = replace(record, metrics=record.metrics | base | held_out.metrics()[0])
            fault = _logged_fault(run, record, replayer.last_line.notes)
        if checkpoint := left.pop(replayer.state.step, None):
            reached.append(_reached(run, checkpoint, replayer.state))

    difference = replayer.replay(step, after=compare).difference
    result = CheckResult.judged(f"replay of step {step}", difference or fault, "the same bits")
    yield replace(result, result=f"differs at {difference}") if difference else result
    yield from reached


def _reached(run: CheckedRun, checkpoint: Checkpoint, state: TrainState) -> CheckResult:
    """A checkpoint of whose bits the ledger lacks a hash, beside the state after its steps."""
    step, parts = checkpoint.step - 1, ", ".join(unchecked(checkpoint, run.ledger))

    def check() -> Difference | None:
        different = other_state(checkpoint, run.ledger.head, state)
        return different and Difference(different, step=step, note=", done again, are not the checkpoint's")

    return CheckResult.judged(
        checkpoint.folder.name, fault_in(check), f"{parts}: those of step {step}, done again"
    )


def _plan(run: CheckedRun, steps: Sequence[int], passes: Sequence[tuple[int, int]]) -> str:
    """Which steps are compared, what must be done again for it, and how long that takes."""
    again = [run.metrics.get(step, {}) for first, last in passes for step in range(first, last + 1)]
    times = [metrics.get(name) for metrics in again for name in _STEP_SECONDS]
    # metrics.jsonl may be damaged.
    seconds = sum(x for x in times if isinstance(x, float) and 0 <= x < math.inf)
    ranges = " and ".join(f"{first} to {last}" for first, last in passes)
    return (
        f"{', '.join(map(str, steps))}, drawn at random, and the last; to reach them, steps {ranges} are "
        f"done again, {duration(seconds)} at the run's own speed"
    )


def evaluations_of(run: CheckedRun, replayer: Replayer) -> Callable[[int], HeldOut]:
    """Step -> the evaluation that the run had there. A run that goes on may be evaluated in another way."""

    def evaluated(environment: Mapping[str, Any]) -> HeldOut:
        noted = {key.removeprefix("process."): value for key, value in environment.items()}
        section = run.config.evaluation
        values = {name: noted.get(f"evaluation.{name}", x) for name, x in section.model_dump().items()}
        changes = {"steps": noted.get("steps", run.config.steps)}
        changes |= {"evaluation": section.model_copy(update=values)}
        return HeldOut(replayer.state, replayer.task, run.config.model_copy(update=changes))

    starts = [(first, evaluated(environment)) for first, environment in reversed(run.ledger.starts)]
    return lambda step: next(held_out for first, held_out in starts if first <= step)


def _logged_fault(run: CheckedRun, record: StepRecord, notes: Mapping[str, Any]) -> str | None:
    """The first field of logs or ledger that is not the one of the step, done again.

    record: with the metrics of the step's evaluations. notes: of its line of the ledger.
    """
    step, G = record.metrics["step"], record.episodes.rewards.shape[1]
    lines = run.rollouts[step].lines if step in run.rollouts else []
    places = [divmod(i, G) for i in range(len(lines))]
    records = [
        (f"{ROLLOUTS}, prompt {p}, sample {g}", line, rollout_line(record, p, g, G))
        for (p, g), line in zip(places, lines, strict=True)
    ]
    if step in run.metrics:
        sides = run.metrics[step], finite(record.metrics | record.notes)
        kept = ({n: x for n, x in side.items() if not n.startswith(_MEASURED)} for side in sides)
        records.append((METRICS, *kept))
    records.append(("the ledger's notes", run.ledger.lines[step].notes, notes))
    each = ((place, first_difference(was, now, same_json)) for place, was, now in records)
    return next((f"{place}: {wrong.beside('the step gives')}" for place, wrong in each if wrong), None)
