"""The report of an ablation: figures of each run, their spread over seeds, a table and plots."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ....files.inputs import RUN_FILE_BYTES, read_text
from ....files.reading import parse_json
from ...display.terminal import Printer
from ...runs.folder import FAILED, METRICS
from ...runs.held_out import MEAN_REWARD, held_out_curve
from .effects import effect_lines

# Metric -> title of its plot, by step.
PLOTS = {
    "reward/mean": "reward",
    MEAN_REWARD: "held-out reward",
    "mismatch/k3": "mismatch k3, nats a token",
    "entropy": "entropy, nats",
    "grad_norm": "gradient norm",
}
# A run has collapsed when its reward falls below this share of its peak and stays there until the end.
COLLAPSED = 0.8
# Columns of the table on a terminal on which not all columns fit.
_NARROW = ("seeds", "last 10 steps", "held-out", "collapsed", "k3")
# Figures of a run that are averaged over seeds.
FIGURES = (
    "reward_best",
    "reward_last",
    "reward_last10",
    "held_out_last",
    "mismatch_k3_mean",
    "mismatch_max_abs",
    "skipped_steps",
    "seconds",
)


def cell_result(path: Path, settings: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The figures of one run, read from its folder.

    `series` holds the (step, value) pairs of each metric of PLOTS; the held-out reward is by steps done.
    """
    lines = [_parsed(path / METRICS, line) for line in _read(path / METRICS).splitlines()]
    summary, failed = (_parsed(path / name, _read(path / name) or "{}") for name in ("summary.json", FAILED))
    series = {name: [(m["step"], m[name]) for m in lines if m.get(name) is not None] for name in PLOTS}
    series[MEAN_REWARD] = held_out_curve(lines)
    rewards, held_out = ([v for _, v in series[name]] for name in ("reward/mean", MEAN_REWARD))
    seconds = [m["time/sample_s"] + m["time/train_s"] for m in lines]
    return {
        "settings": dict(settings),
        "seed": seed,
        "run": str(path),
        "error": failed.get("error"),
        "fingerprint": summary.get("fingerprint"),
        "steps": len(lines),
        "reward_best": max(rewards, default=math.nan),
        "reward_last": rewards[-1] if rewards else math.nan,
        "reward_last10": _mean(rewards[-10:]),
        "held_out_last": held_out[-1] if held_out else math.nan,
        "collapse_step": collapse_step(rewards),
        "mismatch_k3_mean": _mean([v for _, v in series["mismatch/k3"]]),
        "mismatch_max_abs": max((m["mismatch/max_abs"] for m in lines), default=math.nan),
        "skipped_steps": sum(m.get("scaling/skipped", 0.0) > 0 for m in lines),
        "seconds": summary.get("seconds", math.fsum(seconds)),
        "series": series,
    }


def _read(path: Path) -> str:
    return read_text(path, RUN_FILE_BYTES) if path.exists() else ""


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """A JSON object of the file `path`. Raises ValueError."""
    try:
        value = parse_json(text, non_finite=True)
        if not isinstance(value, dict):
            raise ValueError("holds something else than an object")
    except ValueError as error:
        raise ValueError(f"ablate: {path} {error}; remove the run's folder, and it is done again") from None
    return value


def collapse_step(rewards: Sequence[float]) -> int | None:
    """The step from which the reward stays below COLLAPSED of its peak to the end; None where no step is."""
    if not rewards or max(rewards) <= 0:
        return None
    peak = max(rewards)
    last_good = max(i for i, r in enumerate(rewards) if r >= COLLAPSED * peak)
    return last_good + 1 if last_good + 1 < len(rewards) else None


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each combination of settings.

    An entry holds the figures of its runs. It also holds mean, minimum and maximum over seeds: of each
    figure, and of each metric of PLOTS at each step.
    """
    by_settings: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_settings.setdefault(json.dumps(result["settings"]), []).append(result)
    combinations = []
    for runs in by_settings.values():
        entry: dict[str, Any] = {"settings": runs[0]["settings"], "seeds": [r["seed"] for r in runs]}
        entry |= {name: spread([r[name] for r in runs]) for name in FIGURES}
        entry["collapsed"] = sum(r["collapse_step"] is not None for r in runs)
        entry["failed"] = sum(r["error"] is not None for r in runs)
        entry["by_step"] = {name: _by_step([r["series"][name] for r in runs]) for name in PLOTS}
        entry["runs"] = [{k: v for k, v in r.items() if k not in ("series", "settings")} for r in runs]
        combinations.append(entry)
    return combinations


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, minimum and maximum of the values that are finite; NaN where none is."""
    finite = [v for v in values if math.isfinite(v)]
    return {"mean": _mean(finite), "min": min(finite, default=math.nan), "max": max(finite, default=math.nan)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _by_step(series: Sequence[Sequence[tuple[int, float]]]) -> list[dict[str, float]]:
    """Mean, minimum and maximum at each step, over the runs that have that step."""
    values: dict[int, list[float]] = {}
    for run in series:
        for step, value in run:
            values.setdefault(step, []).append(value)
    return [{"step": step, **spread(values[step])} for step in sorted(values)]


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
            "collapsed",
            "k3",
            "max |Δlogp|",
            "skipped",
            "seconds",
        ]
    ]
    for c in combinations:
        collapsed = f"{c['collapsed']}" + (f", {c['failed']} failed" if c["failed"] else "")
        rewards = [_range(c[name], "{:.3f}") for name in ("reward_best", "reward_last10", "held_out_last")]
        mismatch = [_range(c[name], "{:.2g}") for name in ("mismatch_k3_mean", "mismatch_max_abs")]
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
    """Write ablation.md (the table, and what differs) and a plot of each metric of PLOTS by step.

    A plot has a line and a band for each combination: the mean over seeds, and minimum to maximum.
    """
    import matplotlib

    lines = "".join(f"- {line}\n" for line in effect_lines(report["effects"]))
    text = _markdown(report["combinations"]) + (f"\n{lines}" if lines else "")
    (out / "ablation.md").write_text(text, encoding="utf-8")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for metric, title in PLOTS.items():
        if not any(c["by_step"][metric] for c in report["combinations"]):
            continue  # evaluation was off, say
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        for c in report["combinations"]:
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
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if metric == "mismatch/k3":
            axes.set_yscale("symlog", linthresh=1e-9)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
        figure.savefig(out / f"{metric.replace('/', '-').removesuffix('-mean')}.png", dpi=120)
        plt.close(figure)
