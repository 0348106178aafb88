"""`zerokl audit LOG --steps`: the two columns of a log, compared step by step, and under a project's bar.

It needs no model, and knows no family: a new one is shown to keep a bar (figures/bars.py) by a log alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..kernels.sampling_params import SamplingParams
from ..verify.run_files import ROLLOUTS
from .columns import both_columns
from .conclusion.outcome import Kind, Outcome, Tolerances, outcome_of_run
from .figures.bands import band_figures
from .figures.bars import BARS, Bar
from .figures.gates import joined
from .figures.measure import measure
from .finding import Finding
from .formats import fields
from .formats.registry import find_format, log_files, read_rollouts
from .hypotheses.value_checks import LogValues
from .run_report import BarSection, RunReport, Step
from .settings import LOGGED, Source, assumed

_CAUSE = Finding(
    "not looked for",
    "Steps are compared by their figures alone.",
    "`zerokl audit LOG` looks for the cause, `--weight_version N` in one step.",
)


@dataclass
class _Columns:
    """Both columns of a log by step, and what it lacks."""

    trainer: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    sampler: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    completions: int = 0
    without_step: int = 0
    without_trainer: int = 0
    tokens_left_out: int = 0
    params: dict[SamplingParams, None] = field(default_factory=dict)
    values: LogValues = field(default_factory=LogValues)


def audit_steps(
    target: Path, bar: str, format: str, given: SamplingParams | None, tolerances: Tolerances
) -> RunReport:
    """The figures of each step of a log with both columns: a file, a folder, or a run of zerokl.

    bar: a name in BARS, or "". given: the sampling parameters of a line that says none. Raises ValueError for
    a log that cannot be read, and for one without steps or without a trainer's column.
    """
    log = target / ROLLOUTS if (target / ROLLOUTS).is_file() else target
    try:
        columns = _read(log, format, given)
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
    if not columns.trainer:
        lacks = "step" if columns.without_step else "token with both log-probabilities"
        raise ValueError(f"audit: {log} holds no {lacks}, so nothing can be compared by step")
    chosen = BARS[bar] if bar else None
    steps = [
        _step(step, columns.trainer[step], columns.sampler[step], chosen, tolerances)
        for step in sorted(columns.trainer)
    ]
    outcome, faults = outcome_of_run([x.outcome for x in steps]), [x.name for x in columns.values.faults()]
    if chosen and len(steps) < chosen.steps:
        faults.append(f"{len(steps)} of the {chosen.steps} steps that {bar} asks for")
    if faults and outcome.passed:
        outcome = Outcome(Kind.FAULT, tuple(faults))
    return RunReport(
        run=str(log),
        model=str(log),
        step_interval=1,
        sampler="the sampler's column",
        trainer="the trainer's column",
        dtypes=LOGGED,
        assumed=assumed(LOGGED, columns.params, "none", Source(log=str(log))),
        outcome=outcome,
        steps=steps,
        bar=BarSection(
            name=bar,
            figure=_figure(chosen) if chosen else None,
            bound=chosen.gate.bound if chosen else None,
            source=chosen.gate.source if chosen else None,
            steps_asked=chosen.steps if chosen else None,
            lacks=list(_lacks(columns, steps, chosen)),
        ),
    )


def _read(log: Path, format: str, given: SamplingParams | None) -> _Columns:
    columns, remedy = _Columns(), find_format(log_files(log)[0], format).remedy
    for place, rollout in read_rollouts(log, format):
        if rollout.logprobs is None:
            with fields.named(place):
                rollout.check_scored(remedy)
        drawn = rollout.drawn()
        if not drawn.any():
            continue
        columns.completions += 1
        if rollout.step is None or rollout.trainer_logprobs is None:
            columns.without_step += rollout.step is None
            columns.without_trainer += rollout.trainer_logprobs is None
            continue
        rollout = columns.values.taken(place, rollout.drawn_with(given), drawn)
        both = both_columns(rollout, drawn)
        columns.tokens_left_out += int(drawn.sum() - both.sum())
        if rollout.sampling_params:
            columns.params[rollout.sampling_params] = None
        if both.any():
            columns.trainer[rollout.step].append(rollout.trainer_logprobs[both])
            columns.sampler[rollout.step].append(rollout.logprobs[both])
    return columns


def _step(
    step: int,
    trainer: Sequence[np.ndarray],
    sampler: Sequence[np.ndarray],
    bar: Bar | None,
    tolerances: Tolerances,
) -> Step:
    figures, value = measure(trainer, sampler), None
    kind = Kind.EQUAL_COLUMNS if figures.equal else Kind.DIFFERS
    holds = [tolerances.hold(figures, band_figures(trainer, sampler))] if tolerances.given else []
    if bar:
        judged = bar.gate.judged(joined(trainer, sampler))
        value, holds = judged.value, [*holds, judged.holds]
    if holds and kind is Kind.DIFFERS:
        kind = Kind.WITHIN if all(holds) else Kind.BEYOND
    names = ("tokens", "frac_equal", "max_abs", "k1", "k3", "perplexity_sampler", "perplexity_trainer")
    return Step(
        step=step,
        outcome=Outcome(kind),
        **{name: getattr(figures, name) for name in names},
        bits_part_at=None,
        error_jumps_at=None,
        cause=_CAUSE,
        completions=figures.sequences,
        bar=value,
    )


def _figure(bar: Bar) -> str:
    return bar.gate.name or bar.gate.words


def _lacks(columns: _Columns, steps: Sequence[Step], bar: Bar | None) -> Iterator[str]:
    """What the log does not hold, or not say, as sentences."""
    whole = columns.completions
    for count, what in ((columns.without_step, "step"), (columns.without_trainer, "trainer's column")):
        if count:
            yield f"{count:,} of {whole:,} completions have no {what}, and are left out."
    if columns.tokens_left_out:
        yield f"{columns.tokens_left_out:,} drawn tokens lack one of two log-probabilities, and are left out."
    yield from (f"{fault.name}: {fault.text}" for fault in columns.values.faults())
    first, last = steps[0].step, steps[-1].step
    if last - first + 1 > len(steps):
        yield f"Of the steps {first} to {last} the log holds {len(steps)}."
    if bar and bar.asks:
        fewest, most = (pick(x.completions for x in steps) for pick in (min, max))
        counts = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        yield f"The bar is of {bar.asks}: the log does not tell it. It has {counts} completions a step."


def step_sentences(report: RunReport) -> Iterator[str]:
    """Whether every step holds what was asked for, the largest figure, and what the log lacks."""
    rows, bar = report.steps, report.bar
    unequal = [r.step for r in rows if r.frac_equal < 1.0]
    beyond = [r.step for r in rows if r.outcome.kind is Kind.BEYOND]
    if bar.name:
        worst = max(rows, key=lambda r: r.bar)
        verdict = "does not hold" if beyond else "holds"
        if not beyond and len(rows) < bar.steps_asked:
            verdict = f"is not shown: it asks for {bar.steps_asked} steps"
        yield (
            f"Bar {bar.name} {verdict}: {bar.figure} is at most {worst.bar:.4g} over {len(rows)} steps, at "
            f"step {worst.step}; the bar is below {bar.bound:g} ({bar.source})."
        )
    else:
        first = f", first step {unequal[0]}" if unequal else ""
        yield f"{len(unequal)} of {len(rows)} steps differ{first}."
    if beyond:
        yield f"{len(beyond)} of {len(rows)} steps are beyond, first step {beyond[0]}."
    yield from bar.lacks
    yield f"{_CAUSE.text} {_CAUSE.remedy}"
