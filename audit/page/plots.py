"""The plots of audit.html, as SVG: they need no network and no script, and take the page's colours."""

import html
import math
from collections.abc import Sequence

from ..figures.measure import Bucket, Histogram
from ..run_report import Step
from ..sections import TraceSection
from .numbers import number
from .rows import position_name
from .visible import visible

Points = Sequence[tuple[float, float]]  # in pixels

_WIDTH, _HEIGHT = 720, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 26, 46
_FLAGS = 38  # room for the words of two flags above the data
_MARK = 3.2  # half the size of a mark, in pixels
_EDGE = 24  # pixels at an end of the axis where a centred label would be cut, or lie on another one
_BARS, _HIGH = 5, 30  # of a histogram: the fewest bars, and tokens of its highest one for narrow bars


class _Log:
    """A logarithmic scale of values above 0; what is 0, or not finite, has no place on it."""

    def __init__(self, values: Sequence[float | None], room: int = 0):
        self._top = _TOP + room
        known = [v for v in values if v is not None and math.isfinite(v) and v > 0]
        self._low = math.floor(math.log10(min(known, default=1e-1)))
        self._high = max(math.ceil(math.log10(max(known, default=1.0))), self._low + 1)

    def y(self, value: float | None) -> float | None:
        """The place of a value in pixels; None where it has none."""
        if value is None or not math.isfinite(value) or value <= 0:
            return None
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - self._top - _BOTTOM)

    def axis(self) -> str:
        """Grid lines and their labels, at most seven."""
        stride = max(1, math.ceil((self._high - self._low) / 6))
        lines = []
        for exponent in range(self._low, self._high + 1, stride):
            y = self.y(10.0**exponent)
            lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>')
        return "".join(lines)


def operations_plot(trace: TraceSection) -> str:
    """The difference of every operation, and the own errors of both engines, in the order of computation."""
    operations, own_errors = trace.operations, trace.own_errors or {}
    values = [d.relative for d in operations] + [e.relative for es in own_errors.values() for e in es]
    scale, x = _Log(values, _FLAGS), {d.op: _column(i, len(operations)) for i, d in enumerate(operations)}
    body = [scale.axis()]
    for i, (engine, errors) in enumerate(own_errors.items()):
        points = _points([(x[e.op], scale.y(e.relative)) for e in errors if e.op in x])
        body.append(
            _marks(points, f"s{i + 1}", square=bool(i)) + _legend(i + 1, f"own error of {engine}", bool(i))
        )
    between = _points([(x[d.op], scale.y(d.relative)) for d in operations])
    body.append(_line(between, "s0") + _legend(0, "between the two"))
    if first := trace.first_divergence:
        body.append(_flag(x[first.op], f"bits part: {first.op}", 0))
    if (jump := trace.jump) and jump.op in x:
        body.append(_flag(x[jump.op], f"error jumps: {jump.op}", 1))
    starts = [d.op for d in operations if d.op.endswith(".input_norm")]
    stride = max(1, len(starts) // 8)
    body += [_tick(x[op], op.removesuffix(".input_norm")) for op in starts[::stride]]
    label = "Relative difference of every operation, in the order of computation"
    return _svg(label, "".join(body))


def positions_plot(rows: Sequence[Bucket]) -> str:
    """Mean and largest difference by position in the completion."""
    scale = _Log([value for r in rows for value in (r.mean_abs, r.max_abs)])
    x = [_column(i, len(rows)) for i in range(len(rows))]
    body = [scale.axis()]
    for i, (key, words) in enumerate((("mean_abs", "mean |d|"), ("max_abs", "largest |d|"))):
        points = _points(list(zip(x, (scale.y(getattr(r, key)) for r in rows), strict=True)))
        body.append(
            _line(points, f"s{i}") + _marks(points, f"s{i}", square=bool(i)) + _legend(i, words, bool(i))
        )
    body += [_tick(p, position_name(r).replace(" to ", "-")) for p, r in zip(x, rows, strict=True)]
    return _svg("Difference of a token by its position in the completion, from 0", "".join(body))


def steps_plot(rows: Sequence[Step]) -> str:
    """Largest difference and KL by step of a run. What is 0 has no mark: the scale is logarithmic."""
    kinds = (("largest |d|", [r.max_abs for r in rows]), ("k3", [r.k3.value for r in rows]))
    scale = _Log([value for _, values in kinds for value in values])
    last = max(rows[-1].step, 1)
    x = [_LEFT + 12 + r.step / last * (_WIDTH - _LEFT - _RIGHT - 24) for r in rows]
    body = [scale.axis()]
    for i, (words, values) in enumerate(kinds):
        points = _points([(p, scale.y(value)) for p, value in zip(x, values, strict=True)])
        body.append(
            _line(points, f"s{i}") + _marks(points, f"s{i}", square=bool(i)) + _legend(i, words, bool(i))
        )
    stride = max(1, math.ceil(len(rows) / 8))
    body += [_tick(p, str(r.step)) for p, r in list(zip(x, rows, strict=True))[::stride]]
    return _svg("Largest difference and k3 by step of the run", "".join(body))


def ratios_plot(histogram: Histogram) -> str:
    """The histogram of the log ratio of a token."""
    counts, edges = _coarse(histogram.tokens, histogram.log_ratio_edges)
    scale = _Log([0.5, *counts])
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    floor = _HEIGHT - _BOTTOM
    bars = [
        f'<rect class="s0 bar" x="{_LEFT + i * width:.1f}" y="{y:.1f}" width="{width - 1:.1f}" '
        f'height="{floor - y:.1f}"/>'
        for i, n in enumerate(counts)
        if (y := scale.y(n)) is not None
    ]
    ticks = [_tick(_LEFT + i * width, number(edges[i], 2)) for i in (0, len(counts) // 2, len(counts))]
    return _svg(
        "Tokens by their log ratio (trainer - sampler)", scale.axis() + "".join(bars) + "".join(ticks)
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


def _column(i: int, n: int) -> float:
    return _LEFT + (i + 0.5) * (_WIDTH - _LEFT - _RIGHT) / n


def _points(pairs: Sequence[tuple[float, float | None]]) -> Points:
    return [(x, y) for x, y in pairs if y is not None]


def _line(points: Points, name: str) -> str:
    return f'<polyline class="{name} line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _marks(points: Points, name: str, square: bool = False) -> str:
    if square:
        size = 2 * _MARK - 1
        places = (f'x="{x - size / 2:.1f}" y="{y - size / 2:.1f}"' for x, y in points)
        return "".join(f'<rect class="{name}" {p} width="{size}" height="{size}"/>' for p in places)
    return "".join(
        f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{_MARK - 0.6:.1f}"/>' for x, y in points
    )


def _legend(i: int, words: str, square: bool = False) -> str:
    x = _LEFT + 200 * i
    mark = _marks([(x + 4, 10)], f"s{i}", square)
    return f'{mark}<text x="{x + 14}" y="14">{html.escape(visible(words))}</text>'


def _flag(x: float, words: str, row: int) -> str:
    """A vertical line with words beside it, on the side that has more room."""
    left = x > _WIDTH / 2
    place = f'x="{x + (-5 if left else 5):.1f}" text-anchor="{"end" if left else "start"}"'
    return (
        f'<path class="flag f{row}" d="M{x:.1f} {_TOP + 18 * row}V{_HEIGHT - _BOTTOM}"/>'
        f'<text class="flag" {place} y="{_TOP + 12 + 15 * row}">{html.escape(visible(words))}</text>'
    )


def _tick(x: float, words: str) -> str:
    """Words below the axis; at an end of it they stay inside of the plot."""
    anchor = "middle"
    if len(words) > 4 and x > _WIDTH - _RIGHT - _EDGE:
        x, anchor = _WIDTH - 4, "end"
    elif len(words) > 4 and x < _LEFT + _EDGE:
        x, anchor = _LEFT, "start"
    place = f'x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(visible(words))}</text>"


def _svg(label: str, body: str) -> str:
    escaped = html.escape(visible(label))
    below = f'<text class="label" x="{_LEFT}" y="{_HEIGHT - 8}">{escaped}</text>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escaped}">'
        f"<title>{escaped}</title>{body}{below}</svg>"
    )
