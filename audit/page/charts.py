"""The charts of audit.html (pages/charts.py draws them)."""

import math
from collections.abc import Sequence
from itertools import pairwise

from ...pages.charts import Chart, Series
from ..figures.measure import Bucket, Histogram
from ..run_report import Step
from ..sections import TraceSection
from .numbers import number
from .rows import position_name

_BARS, _HIGH = 5, 30  # of a histogram: the fewest bars, and tokens of its highest one for narrow bars


def operations_chart(trace: TraceSection) -> Chart:
    """The difference of every operation, and the own errors of both engines, in the order of computation."""
    names = [d.op for d in trace.operations]
    series = [Series("between the two", [d.relative for d in trace.operations])]
    for kind, (engine, errors) in zip(("marks", "hollow"), (trace.own_errors or {}).items(), strict=False):
        by_op = {e.op: e.relative for e in errors}
        series.append(Series(f"own error of {engine}", [by_op.get(op) for op in names], kind))
    flags = [(trace.first_divergence, "bits part"), (trace.jump, "error jumps")]
    layers = [(i, op.removesuffix(".input_norm")) for i, op in enumerate(names) if op.endswith(".input_norm")]
    return Chart(
        "Relative difference of every operation, in the order of computation",
        range(len(names)),
        series,
        layers[:: max(1, len(layers) // 8)],
        names,
        [(names.index(x.op), f"{words}: {x.op}") for x, words in flags if x and x.op in names],
    )


def positions_chart(rows: Sequence[Bucket]) -> Chart:
    """Mean and largest difference by position in the completion."""
    names = [position_name(row).replace(" to ", "-") for row in rows]
    return Chart(
        "Difference of a token by its position in the completion, from 0",
        range(len(rows)),
        [
            Series("mean |d|", [row.mean_abs for row in rows], "both"),
            Series("largest |d|", [row.max_abs for row in rows], "both"),
        ],
        list(enumerate(names)),
        [f"position {name}" for name in names],
    )


def steps_chart(rows: Sequence[Step]) -> Chart:
    """Largest difference and KL by step of a run."""
    steps = [row.step for row in rows]
    return Chart(
        "Largest difference and k3 by step of the run",
        steps,
        [
            Series("largest |d|", [row.max_abs for row in rows], "both"),
            Series("k3", [row.k3.value for row in rows], "both"),
        ],
        [(step, str(step)) for step in steps[:: max(1, math.ceil(len(steps) / 8))]],
        [f"step {step}" for step in steps],
    )


def ratios_chart(histogram: Histogram) -> Chart:
    """The histogram of the log ratio of a token."""
    counts, edges = _coarse(histogram.tokens, histogram.log_ratio_edges)
    n = len(counts)
    return Chart(
        "Tokens by their log ratio (trainer - sampler)",
        range(n),
        [Series("tokens", counts, "bars")],
        [(i - 0.5, number(edges[i], 2)) for i in (0, n // 2, n)],
        [f"{number(low, 3)} to {number(high, 3)}" for low, high in pairwise(edges)],
    )


def _coarse(counts: Sequence[int], edges: Sequence[float]) -> tuple[list[int], list[float]]:
    """The histogram with wider buckets where few tokens would give many bars of one token.

    An odd number of buckets keeps one about 0.
    """
    counts, edges = list(counts), list(edges)
    while len(counts) >= 3 * _BARS and len(counts) % 3 == 0 and max(counts) < _HIGH:
        counts = [sum(counts[i : i + 3]) for i in range(0, len(counts), 3)]
        edges = edges[::3]
    return counts, edges
