"""audit.html: one file that tells the result to someone who has never seen zerokl."""

import base64
import html
import io
import math
from pathlib import Path
from typing import Any

from rich.table import Table

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
    "img{max-width:100%}code{background:#f3f3f3;padding:0 .2rem}"
)
# Name in the report -> its meaning.
_MEANING = {
    "tokens": "completion tokens compared",
    "frac_equal": "share of them whose two log-probabilities have the same bits",
    "max_abs": "largest |trainer - sampler| of a token's log-probability",
    "k1": "mean of sampler - trainer; estimates KL(sampler || trainer), unbiased, noisy",
    "k2": "mean of half the squared difference",
    "k3": "mean of ratio - 1 - log ratio; estimates the same KL, never negative",
    "perplexity_sampler": "exp of the sampler's mean negative log-probability",
    "perplexity_trainer": "exp of the trainer's mean negative log-probability",
}
# Headings of the tokens that differ most.
_WORST = ("sequence", "position", "text before", "token", "sampler", "trainer")


def verdict(report: dict[str, Any]) -> str:
    """The audit in a few sentences."""
    sampler, trainer = report["sampler"], report["trainer"]
    if report["frac_equal"] == 1.0:
        return (
            f"All {report['tokens']} tokens have the same log-probability, bit for bit, "
            f"in {sampler} and in {trainer}."
        )
    share = math.floor(1e4 * report["frac_equal"]) / 1e4  # never 100% where a token differs
    text = (
        f"{sampler} and {trainer} agree to the bit on {share:.2%} of {report['tokens']} tokens; "
        f"the largest difference of a log-probability is {report['max_abs']:.3g}, "
        f"and KL(sampler || trainer) is about {report['k3']['value']:.2g} nats a token."
    )
    first = report.get("first_divergence")
    if first:
        ulp = "" if first["max_ulp"] is None else f", by up to {first['max_ulp']} representable numbers"
        text += (
            f" They part at {first['op']}: {first['unequal']} of its {first['elements']} outputs differ{ulp}."
        )
    if report.get("stale_cache"):
        redrawn = (
            "every log-probability is equal"
            if report["frac_equal_without_caches"] == 1.0
            else "the sampler gives other bits"
        )
        text += f" Drawn again with its caches dropped, {redrawn}: it had used a stale cache."
    elif "operations" in report and not first:
        text += _equal_operations(sampler, report["traced_outside"])
    return text


def _equal_operations(sampler: str, traced_outside: bool) -> str:
    """The sentence for engines that differ although every operation of their traces is equal."""
    outside = f", {sampler}'s outside of its process," if traced_outside else ""
    process = ", or from what only that process computes" if traced_outside else ""
    return (
        f" Forwards over one sequence alone{outside} agree in every operation: "
        f"the difference comes from batching, from the cache, or from other weights{process}."
    )


def summary_table(report: dict[str, Any]) -> Table:
    """The figures, as the command line prints them."""
    sampler = f"{report['sampler']} ({report['sampler_dtype']})"
    trainer = f"{report['trainer']} ({report['dtype']})"
    table = Table("figure", "value", "meaning", title=f"{sampler} against {trainer}")
    for name, value, meaning in _rows(report):
        table.add_row(name, value, meaning)
    return table


def worst_table(report: dict[str, Any]) -> Table:
    """The tokens whose log-probabilities differ most, with their text, as the command line prints them."""
    table = Table(*_WORST, title="tokens farthest apart")
    for row in _worst_rows(report)[:5]:
        table.add_row(*map(str, row))
    return table


def _worst_rows(report: dict[str, Any]) -> list[tuple]:
    return [
        (
            w["sequence"],
            w["position"],
            repr(w["before"]),
            repr(w["text"]),
            f"{w['sampler']:.6f}",
            f"{w['trainer']:.6f}",
        )
        for w in report["worst"]
    ]


def _rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every figure."""
    rows = []
    if report.get("logged"):
        compared = f"{report['sequences']} of {report['logged']}"
        rows.append(("rollouts", compared, "compared, of those in the log; -n takes more or fewer"))
    for name, meaning in _MEANING.items():
        value = report[name]
        shown = (
            f"{value['value']:.4g} ± {value['standard_error']:.2g}"
            if isinstance(value, dict)
            else f"{value:.6g}"
        )
        rows.append((name, shown, meaning))
    for q, value in report["abs_percentiles"].items():
        rows.append((f"|d| p{q}", f"{value:.4g}", f"{q}% of the tokens differ by no more"))
    for level in ("token", "sequence"):
        rows += _ratio_rows(level, report[level])
    for engine, ways in report["own_invariance"].items():
        for way, figures in ways.items():
            unequal = f"{figures['unequal']} of {figures['tokens']} unequal"
            rows.append((f"{engine}: {way}", unequal, f"largest difference {figures['max_abs']:.3g}"))
    for bucket in report["by_position"]:
        last = f" to {bucket['to'] + 1}" if bucket["to"] > bucket["from"] else ""
        meaning = f"mean |d| of {bucket['tokens']} tokens; largest {bucket['max_abs']:.3g}"
        rows.append((f"position {bucket['from'] + 1}{last}", f"{bucket['mean_abs']:.4g}", meaning))
    return rows


def _ratio_rows(level: str, ratios: dict[str, float]) -> list[tuple[str, str, str]]:
    """Name, value and meaning of the figures of the ratios of tokens, or of sequences."""
    return [
        (
            f"ratio, {level}",
            f"{ratios['ratio_min']:.6g} .. {ratios['ratio_max']:.6g}",
            f"exp(trainer - sampler) of a {level}, smallest and largest",
        ),
        (
            f"chi2, {level}",
            f"{ratios['chi2']:.4g}",
            "mean of the squared ratio, minus 1; the variance of the ratio where its mean is 1",
        ),
        (
            f"ess, {level}",
            f"{ratios['ess']:.6f}",
            "effective sample size of importance sampling, as a share",
        ),
    ]


def write_page(report: dict[str, Any], path: Path) -> None:
    """Write audit.html, plots included."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>zerokl audit</title>',
        f"<style>{_STYLE}</style>",
        f"<h1>Audit of {html.escape(report['model'])}</h1>",
        f"<p><b>{html.escape(verdict(report))}</b></p>",
        _table(("figure", "value", "meaning"), _rows(report)),
        f'<p><img src="data:image/png;base64,{_plots(report)}" alt="plots"></p>',
    ]
    if report["worst"]:
        parts += ["<h2>Tokens farthest apart</h2>", _table(_WORST, _worst_rows(report))]
    if "operations" in report:
        headings = ("operation", "outputs that differ", "largest ulp", "largest difference", "relative rms")
        parts += [
            "<h2>Operation by operation</h2>",
            "<p>One sequence through both engines, in the order of computation.</p>",
            _table(headings, _operation_rows(report)),
        ]
    path.write_text("".join(parts) + "</html>\n", encoding="utf-8")


def _operation_rows(report: dict[str, Any]) -> list[tuple]:
    return [
        (
            d["op"],
            f"{d['unequal']} of {d['elements']}",
            "-" if d["max_ulp"] is None else d["max_ulp"],
            f"{d['max_abs']:.3g}",
            f"{d['relative']:.3g}",
        )
        for d in report["operations"]
    ]


def _table(headings: tuple[str, ...], rows: list[tuple]) -> str:
    def line(tag: str, row: tuple) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in row) + "</tr>"

    return "<table>" + line("th", headings) + "".join(line("td", row) for row in rows) + "</table>"


def _plots(report: dict[str, Any]) -> str:
    """The plots, as a PNG in base64.

    They show the histogram of the ratio, the growth of the difference with the position and, where there is a
    trace, its growth with depth.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    operations = report.get("operations", [])
    figure = Figure(figsize=(9, 3 * (2 + bool(operations))), layout="constrained")
    axes = figure.subplots(2 + bool(operations), 1)
    edges, counts = report["ratio_histogram"]["log_ratio_edges"], report["ratio_histogram"]["tokens"]
    axes[0].stairs(counts, edges, fill=True)
    axes[0].set(yscale="symlog", xlabel="log ratio of a token (trainer - sampler)", ylabel="tokens")
    rows = report["by_position"]
    axes[1].plot([r["from"] + 1 for r in rows], [r["mean_abs"] for r in rows], marker="o", label="mean")
    axes[1].plot([r["from"] + 1 for r in rows], [r["max_abs"] for r in rows], marker="o", label="largest")
    axes[1].set(xscale="log", xlabel="position in the completion, from 1", ylabel="|log ratio|")
    axes[1].legend()
    if operations:
        relative = [d["relative"] for d in operations]
        smallest = min(filter(None, relative), default=1.0)
        axes[2].plot(relative, marker=".", linewidth=0.8)
        axes[2].set_yscale("symlog", linthresh=smallest)  # equal operations lie at 0
        axes[2].set_xlabel("operation, in the order of computation")
        starts = {
            i: d["op"].removesuffix(".input_norm")
            for i, d in enumerate(operations)
            if d["op"].endswith(".input_norm")
        }
        starts |= {i: d["op"] for i, d in enumerate(operations) if d["op"] in ("norm", "logits")}
        axes[2].set_xticks(list(starts), starts.values(), rotation=45, ha="right", fontsize=7)
        axes[2].set_ylabel("relative rms difference")
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return base64.b64encode(out.getvalue()).decode()
