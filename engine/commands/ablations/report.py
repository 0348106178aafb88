"""The report of an ablation: a table, what was found, and plots."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ...display.terminal import Printer
from .effects import effect_lines
from .figures import PLOTS
from .hypotheses import hypothesis_line

# The figures of the table's columns, rewards and entropy before the collapsed runs, and mismatch after them.
_REWARDS = ("reward_best", "reward_last10", "held_out_last", "sampler_held_out_last", "entropy_last10")
_MISMATCH = (
    "mismatch_k3_mean",
    "mismatch_k3_sequence_mean",
    "mismatch_mean_abs_mean",
    "mismatch_max_abs",
)
# The halves of policies.png: title, and the figures that are drawn, each with its mark and colour.
_HALVES = (
    ("training problems", {"reward_last10": ("o", "tab:gray"), "training_last": ("D", "tab:red")}),
    ("held-out problems", {"sampler_held_out_last": ("o", "tab:gray"), "held_out_last": ("D", "tab:red")}),
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
    return "".join(f"| {' | '.join(row)} |\n" for row in (headings, ["---"] * len(headings), *rows))


def _range(values: Mapping[str, float], template: str) -> str:
    """A cell of the table: `values` is a spread, `template` formats one number."""
    if not math.isfinite(values["mean"]):
        return "-"
    mean, low, high = (template.format(values[k]) for k in ("mean", "min", "max"))
    return mean if low == high else f"{mean}\n{low} to {high}"


def write_report(report: Mapping[str, Any], out: Path) -> None:
    """Write ablation.md (the table, and what was found), and plots.

    A plot of each metric of PLOTS by step has a line and a band for each combination: the mean over seeds,
    and minimum to maximum. policies.png has a row for each combination: what its runs earned at the end.
    """
    import matplotlib

    found = [*map(hypothesis_line, report["hypotheses"]), *effect_lines(report["effects"])]
    lines = "".join(f"- {line}\n" for line in found)
    text = _markdown(report["combinations"]) + (f"\n{lines}" if lines else "")
    (out / "ablation.md").write_text(text, encoding="utf-8")
    matplotlib.use("Agg")
    for metric in PLOTS:
        if any(c["by_step"][metric] for c in report["combinations"]):  # evaluation may be off
            _plot_by_step(report["combinations"], metric, out)
    _plot_policies(report["combinations"], out / "policies.png")


def _plot_by_step(combinations: Sequence[Mapping[str, Any]], metric: str, out: Path) -> None:
    """The plot of a metric of PLOTS."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for c in combinations:
        points = c["by_step"][metric]
        steps = [p["step"] for p in points]
        (line,) = axes.plot(
            steps, [p["mean"] for p in points], label=", ".join(c["settings"].values()) or "run"
        )
        axes.fill_between(
            steps,
            [p["min"] for p in points],
            [p["max"] for p in points],
            color=line.get_color(),
            alpha=0.15,
            lw=0,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(PLOTS[metric])
    axes.grid(alpha=0.3)
    if metric == "mismatch/k3":
        axes.set_yscale("symlog", linthresh=1e-9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(out / f"{metric.replace('/', '-').removesuffix('-mean')}.png", dpi=120)
    plt.close(figure)


def _plot_policies(combinations: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A row for each combination: a small mark for each seed's figure, and a large one for their mean."""
    from matplotlib import pyplot as plt

    size = (9, 1.3 + 0.36 * len(combinations))
    figure, halves = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for axes, (title, marks) in zip(halves, _HALVES, strict=True):
        for shift, (name, (marker, color)) in zip((-0.13, 0.13), marks.items(), strict=True):
            for row, c in enumerate(combinations):
                values = [run[name] for run in c["runs"]]
                axes.plot(values, [row + shift] * len(values), marker, color=color, ms=3, alpha=0.35)
                axes.plot(c[name]["mean"], row + shift, marker, color=color, ms=7)
        axes.set_xlabel(f"reward, {title}")
        axes.grid(alpha=0.3)
    names = [", ".join(c["settings"].values()) or "all runs" for c in combinations]
    halves[0].set_yticks(range(len(names)), names)
    halves[0].invert_yaxis()
    entries = [plt.Line2D([], [], marker=m, color=c, ls="", ms=7) for m, c in _HALVES[0][1].values()]
    labels = ["the sampler's policy", "the trainer's policy, which is saved"]
    figure.legend(entries, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)
