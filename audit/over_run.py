"""`zerokl audit RUN --every K`: the checkpoints of a run are audited, and mismatch is shown against step.

Each checkpoint is audited in a process of its own: a process holds one vLLM engine, and none then keeps a
cache of the weights before.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from ..engine.display.progress import silent
from ..files.reading import read_toml
from ..verify.run_files import CONFIG, checkpoint_folders
from .command import run_audit, write_reports
from .conclusion.outcome import Kind, outcome_of_run
from .config import AuditSettings
from .report import Report
from .run_report import RunReport, Step

_KINDS = list(Kind)


def audit_run(
    run: Path,
    step_interval: int,
    n: int | None,
    settings: AuditSettings,
    out: Path,
    stage: Callable[[str], None] = silent,
) -> RunReport:
    """Audit the checkpoints of a run whose step `step_interval` divides; step 0 is the model it began with.

    Each audit's own audit.json and audit.html go to out/step-NNNNNN. stage: is called with what begins now,
    in words. Raises ValueError for a folder without a run, for a run without such a checkpoint, and for bad
    input.
    """
    models = _models(run, step_interval)
    reports: dict[int, Report] = {}
    for step, model in models.items():
        stage(f"step {step} ({len(reports) + 1} of {len(models)} checkpoints)")
        reports[step] = audit_apart(model, n, settings)
        write_reports(reports[step], out / f"step-{step:06d}")
    first = next(iter(reports.values()))
    return RunReport(
        run=str(run),
        model=f"checkpoints of {run}",
        step_interval=step_interval,
        sampler=first.sampler,
        trainer=first.trainer,
        dtypes=first.dtypes,
        assumed=first.assumed,
        outcome=outcome_of_run([report.outcome for report in reports.values()]),
        steps=[_step(step, report) for step, report in reports.items()],
    )


def audit_apart(model: Path, n: int | None, settings: AuditSettings) -> Report:
    """Audit a model in a process of its own. Raises ValueError for bad input.

    The executor brings back the report, a tree of dataclasses, and errors with their types. A Channel of
    engine/processes has messages of bytes, and JSON does not hold a report whole.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(run_audit, str(model), "", n, settings).result()


def _models(run: Path, step_interval: int) -> dict[int, Path]:
    """The model of each step that is audited, by step."""
    if step_interval < 1:
        raise ValueError(f"audit: every ({step_interval}) must be at least 1")
    base = _first_model(run)
    by_step = {0: base} if base.is_dir() else {}
    by_step |= {int(folder.name[5:]): folder for folder in reversed(checkpoint_folders(run))}
    models = {step: folder for step, folder in by_step.items() if step % step_interval == 0}
    if not models:
        steps = ", ".join(map(str, by_step)) or "none"
        raise ValueError(
            f"audit: {run} has no checkpoint of a step that {step_interval} divides (it has {steps})"
        )
    return models


def _first_model(run: Path) -> Path:
    """The model that a run began with. Raises ValueError for a folder without a run."""
    file = run / CONFIG
    if not file.is_file():
        raise ValueError(f"audit: {run} holds no run ({CONFIG} is missing)")
    try:
        model = read_toml(file).get("model")
    except (OSError, ValueError) as error:
        raise ValueError(f"audit: {file} cannot be read ({error})") from None
    if not isinstance(model, str):
        raise ValueError(f"audit: {file} names no model")
    return Path(model)


def _step(step: int, report: Report) -> Step:
    """What the report over a run says of one checkpoint."""
    figures, trace = report.figures, report.trace
    first, jump = (trace.first_divergence, trace.jump) if trace else (None, None)
    names = ("tokens", "frac_equal", "max_abs", "k1", "k3", "perplexity_sampler", "perplexity_trainer")
    return Step(
        step=step,
        outcome=report.outcome,
        **{name: getattr(figures, name) for name in names},
        bits_part_at=first.op if first else None,
        error_jumps_at=jump.op if jump else None,
        cause=report.cause,
    )


def sentences(report: RunReport) -> Iterator[str]:
    """Whether the mismatch grows, and what the worst checkpoint's audit gives as its cause."""
    rows = report.steps
    unequal = [r.step for r in rows if r.frac_equal < 1.0]
    if not unequal and report.outcome.passed:
        steps = f"all {len(rows)} checkpoints" if len(rows) > 1 else "the checkpoint"
        yield f"{report.sampler} and {report.trainer} are equal to the bit at {steps}."
        return
    if unequal:
        yield f"{len(unequal)} of {len(rows)} checkpoints differ, first that of step {unequal[0]}."
    first, last = rows[0], rows[-1]
    if first is not last:
        for words, a, b in (
            ("The largest difference of a log-probability", first.max_abs, last.max_abs),
            ("KL(sampler || trainer), by k3,", first.k3.value, last.k3.value),
            ("The sampler's perplexity", first.perplexity_sampler, last.perplexity_sampler),
        ):
            yield f"{words} is {_figure(a)} at step {first.step} and {_figure(b)} at step {last.step}."
    worst = max(rows, key=lambda r: (_KINDS.index(r.outcome.kind), _size(r.max_abs)))
    yield f"Likely cause at step {worst.step}: {worst.cause.text}"
    yield f"What to do: {worst.cause.remedy}"


def _size(max_abs: float) -> float:
    """The largest difference; one that is not finite is the largest."""
    return max_abs if math.isfinite(max_abs) else math.inf


def _figure(x: float) -> str:
    return f"{x:.3g}" if math.isfinite(x) else "not finite"
