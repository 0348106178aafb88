"""The tables of an audit in a terminal."""

import itertools
from collections.abc import Iterable, Sequence

from rich.table import Table

from ...pages.html import visible
from ...verify.bias_figures import DrawnBias
from ..report import Report
from ..run_report import RunReport
from .gradient_tables import LEGEND, LOSSES, drawn_from, loss_rows
from .rows import (
    AGAINST,
    HYPOTHESES,
    PLUS_MINUS,
    WORST,
    against_rows,
    figure_rows,
    full_vocab_rows,
    hypothesis_rows,
    own_rows,
    position_rows,
    setting_rows,
    step_figures,
    step_rows,
    worst_rows,
)


def report_tables(report: Report) -> list[Table]:
    """What the command line prints of a report: figures, worst tokens, hypotheses, settings, changes."""
    tables = [_figures(report)]
    if report.shown.worst:
        tables.append(_table(WORST, worst_rows(report)[:5], "tokens farthest apart"))
    if (rows := hypothesis_rows(report)) and not report.shown.figures.equal:
        tables.append(_table(HYPOTHESES, rows[:5], "what would explain the difference, nearest first"))
    if report.gradient:
        tables.append(_gradient(report.gradient))
    tables.append(_settings(report))
    if report.against:
        tables.append(_table(AGAINST, against_rows(report), f"since {report.against.audit}"))
    return tables


def run_tables(report: RunReport) -> list[Table]:
    """What the command line prints of the report over a run: the checkpoints, and the settings."""
    title = f"{report.sampler} against {report.trainer}, by step of {report.run}"
    shown = 6  # more columns would not fit a terminal of 80
    return [
        _table(step_figures(report)[:shown], [cells[:shown] for cells in step_rows(report)], title),
        _settings(report),
    ]


def _figures(report: Report) -> Table:
    dtypes = (
        ("logged", "logged") if report.is_of_columns else (report.dtypes.sampler_dtype, report.dtypes.dtype)
    )
    sides = [f"{name} ({dtype})" for name, dtype in zip(report.shown[:2], dtypes, strict=True)]
    rows = (
        figure_rows(report),
        full_vocab_rows(report.full_vocab),
        own_rows(report),
        position_rows(report),
    )
    title = " against ".join(sides)
    table = _table(("figure", "value", "meaning"), [*itertools.chain(*rows)], title)
    table.caption = PLUS_MINUS
    return table


def _gradient(bias: DrawnBias) -> Table:
    table = _table(LOSSES, loss_rows(bias.losses), "the gradient against the exact one")
    table.caption = f"{drawn_from(bias)} {LEGEND}"
    return table


def _settings(report: Report | RunReport) -> Table:
    return _table(("assumed", "value"), setting_rows(report), "what these figures hold for")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
    table = Table(*headings, title=visible(title))
    for row in rows:
        table.add_row(*map(visible, row))
    return table
