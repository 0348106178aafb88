"""Figures as text, alike in the terminal and on the page."""

import math

from ...pages.html import visible
from ...verify.mismatch import Estimate


def number(x: float | None, digits: int = 4) -> str:
    """A figure; "-" where there is none, since JSON has neither infinities nor NaN."""
    if x is None or math.isnan(x):
        return "-"
    return f"{x:.{digits}g}"


def estimate(x: Estimate, digits: int = 4) -> str:
    """A figure and its standard error."""
    return f"{number(x.value, digits)} ± {number(x.standard_error, 2)}"


def percent(share: float) -> str:
    """A share, never rounded up to 100%."""
    return f"{math.floor(1e4 * share) / 1e4:.2%}"


def logprob(x: float | None) -> str:
    """A log-probability. JSON holds null where it is minus infinity."""
    return "-inf" if x is None or math.isinf(x) else f"{x:.6f}"


def quoted(text: str) -> str:
    """A model's text in quotes, with nothing that a terminal would obey."""
    return f"'{visible(text)}'"


def distance(max_ulp: int | None) -> str:
    """A distance in representable numbers; a large one says nothing (verify/distance.py)."""
    if max_ulp is None:
        return "-"
    return f"{max_ulp:,}" if max_ulp <= 1 << 20 else "more than 2^20"
