"""A constant factor between the metrics of two runs: all of B is k times A."""

from collections.abc import Sequence

from .metric_rows import GRADIENT_NORM, Row, number

# Metrics are often written in six digits.
_ROUNDING = 2e-5
# Rows in which the factor of one metric must be the same.
_ROWS = 3
_LARGEST = 4096


def factor_words(rows: Sequence[tuple[Row, Row]], names: Sequence[str]) -> str:
    """What metrics of B are k times those of A, in words; empty where none are.

    rows: of both, from the first that differ on. names: the metrics that differ in the first. One metric
    needs the factor in all rows. Two with other values need it in the first row, and a k that is whole or one
    over a whole number; later the two runs have drifted apart.
    """
    first = {name: k for name in names if (k := _factor(*rows[0], name)) is not None}
    if not first:
        return ""
    lasting = [name for name, k in first.items() if _lasts(rows, name, k)]
    if lasting:
        k = first[lasting[0]]
        same = [name for name in lasting if _near(first[name], k)]
        return _words(same, k, f"in all {len(rows)} rows from the first difference on")
    for k in first.values():
        same = [n for n in first if _near(first[n], k)]
        values = {number(rows[0][0][n]) for n in same}
        if len(values) > 1 and _is_plain(k):
            return _words(same, k, "in the first row that differs; later the runs drift apart")
    return ""


def _factor(x: Row, y: Row, name: str) -> float | None:
    a, b = number(x.get(name)), number(y.get(name))
    if not a or b is None or _near(b / a, 1.0):
        return None
    return b / a


def _lasts(rows: Sequence[tuple[Row, Row]], name: str, k: float) -> bool:
    """Whether a metric has one factor in all rows that have it, and is not itself constant."""
    pairs = [(number(x.get(name)), number(y.get(name))) for x, y in rows]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    constant = len({a for a, _ in pairs}) < 2
    return len(pairs) >= _ROWS and not constant and all(_near(b, k * a) for a, b in pairs)


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= _ROUNDING * max(abs(x), abs(y))


def _is_plain(k: float) -> bool:
    """Whether k or 1 / k is a whole number above 1."""
    n = round(max(k, 1 / k)) if k > 0 else 0
    return 1 < n <= _LARGEST and _near(max(k, 1 / k), n)


def _words(names: Sequence[str], k: float, where: str) -> str:
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    words = f"{listed} of B {'are' if len(names) > 1 else 'is'} {k:.6g} x A's, {where}: a constant factor."
    if any(GRADIENT_NORM.search(n) or n.endswith("loss") for n in names):
        words += (
            " A loss that is divided or summed once more does that: by micro-batches, steps of accumulation, "
            "ranks or tokens."
        )
    return words
