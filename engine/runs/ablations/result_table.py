"""The report of an ablation in a terminal and in Markdown: a table, and what differs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ....pages.markdown import table as markdown_table
from ...display.terminal import Printer
from .effects import effect_lines
from .hypotheses import hypothesis_line

# The figures of the table's columns, rewards and entropy before the collapsed runs, and mismatch after them.
_REWARDS = ("reward_best", "reward_last10", "held_out_last", "sampler_held_out_last", "entropy_last10")
_MISMATCH = (
    "mismatch_k3_mean",
    "mismatch_k3_sequence_mean",
    "mismatch_mean_abs_mean",
    "mismatch_max_abs",
)
# Columns of the table on a terminal on which not all columns fit.
_NARROW = ("seeds", "last 10 steps", "held-out", "collapsed", "k3")


def result_rows(combinations: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of headings, then a row for each combination.

    A cell holds the mean over seeds, and on a second line minimum and maximum.
    """
    axes = list(combinations[0]["settings"])
    rows = [
        [
            *axes,
            "seeds",
            "best reward",
            "last 10 steps",
            "held-out",
            "sampler's",
            "entropy",
            "collapsed",
            "k3",
            "k3 a sequence",
            "mean |Δlogp|",
            "max |Δlogp|",
            "skipped",
            "seconds",
        ]
    ]
    for c in combinations:
        collapsed = f"{c['collapsed']}" + (f", {c['failed']} failed" if c["failed"] else "")
        rewards = [_range(c[name], "{:.3f}") for name in _REWARDS]
        mismatch = [_range(c[name], "{:.2g}") for name in _MISMATCH]
        rest = [f"{c['skipped_steps']['mean']:g}", f"{c['seconds']['mean']:.0f}"]
        rows.append(
            [*[c["settings"][a] for a in axes], str(len(c["seeds"])), *rewards, collapsed, *mismatch, *rest]
        )
    return rows


def result_table(combinations: Sequence[Mapping[str, Any]], console: Printer) -> Table:
    """The rows for a terminal: every column where they fit its width, or else those that say most.

    The narrower table names a combination in one column, where a long name wraps.
    """
    headings, *full = result_rows(combinations)
    whole = _table([headings, *full])
    # A measure never exceeds the width of its options, so the wanted width is that in a space without end.
    endless = console.options.update_width(1 << 16)
    if console.measure(whole, options=endless).maximum <= console.width:
        return whole
    rows = [["combination", *_NARROW]]
    for c, row in zip(combinations, full, strict=True):
        values = dict(zip(headings, row, strict=True))
        rows.append([", ".join(c["settings"].values()) or "all runs", *(values[name] for name in _NARROW)])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """A table of the rows, of which the first has the headings."""
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _markdown(combinations: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a document."""
    headings, *rows = (
        [cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in result_rows(combinations)
    )
    return markdown_table(headings, rows) + "\n"


def _range(values: Mapping[str, float], template: str) -> str:
    """A cell of the table: `values` is a spread, `template` formats one number."""
    if not math.isfinite(values["mean"]):
        return "-"
    mean, low, high = (template.format(values[k]) for k in ("mean", "min", "max"))
    return mean if low == high else f"{mean}\n{low} to {high}"


def write_table(report: Mapping[str, Any], out: Path) -> None:
    """Write ablation.md: the table, and what differs."""
    differences = [*map(hypothesis_line, report["hypotheses"]), *effect_lines(report["effects"])]
    lines = "".join(f"- {line}\n" for line in differences)
    text = _markdown(report["combinations"]) + (f"\n{lines}" if lines else "")
    (out / "ablation.md").write_text(text, encoding="utf-8")
