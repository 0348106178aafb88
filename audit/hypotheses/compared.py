"""How far a prediction and the columns are from a log, token by token.

Shapes: C completion tokens of a line.
"""

import numpy as np

from .judgement import MOST
from .noise import beyond_slack
from .scorable_lines import Line


def apart(line: Line, scores: np.ndarray) -> np.ndarray:
    """|logged - scores| of a line's tokens, [C] fp64; NaN where either is unknown."""
    with np.errstate(invalid="ignore"):
        d = np.abs(line.logged.astype(np.float64) - scores)
    # Both columns at -inf are equal.
    return np.minimum(np.where(np.isinf(line.logged) & (line.logged == scores), 0.0, d), MOST)


def shifted(scored: np.ndarray, predicted: np.ndarray, base: np.ndarray) -> np.ndarray:
    """base + (predicted - scored); the prediction itself where that is unknown, or the base is the score."""
    if base is scored:
        return predicted
    with np.errstate(invalid="ignore"):
        x = base.astype(np.float64) + predicted - scored
    return np.where(np.isfinite(x), x, predicted)


class Compared:
    """The sums over the lines of a prediction, in nats."""

    def __init__(self) -> None:
        self.before = self.after = self.before_base = self.after_base = 0.0
        self.tokens = self.nearer = 0
        self.effects: list[np.ndarray] = []
        self.differences: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []
        self.left: list[np.ndarray] = []

    def add(
        self, line: Line, scores: np.ndarray, base: np.ndarray, gaps: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Take a line. scores, base: the prediction and the nearest column, [C]. gaps: those of _Judge."""
        moved = shifted(line.scored, scores, base)
        (now, beside_base), direct = gaps, apart(line, scores)
        follows = direct if moved is scores else apart(line, moved)
        both = ~(np.isnan(now) | np.isnan(direct) | np.isnan(beside_base) | np.isnan(follows))
        a, b, c, d = (float(x[both].sum()) for x in (now, direct, beside_base, follows))
        self.before, self.after = self.before + a, self.after + min(a, b)
        self.before_base, self.after_base = self.before_base + c, self.after_base + min(c, d)
        self.tokens, self.nearer = self.tokens + int(both.sum()), self.nearer + (b < a)
        with np.errstate(invalid="ignore"):
            left = line.logged.astype(np.float64) - (moved if d < c else base)
            effect, r = moved.astype(np.float64) - base, line.logged.astype(np.float64) - base
        left = beyond_slack(np.clip(left, -MOST, MOST), line.slack)
        self.left.append(np.where(both, left, np.nan))
        self.scores.append(line.scored)
        known = both & np.isfinite(effect) & np.isfinite(r) & (d < c)
        self.effects.append(np.where(known, effect, np.nan))
        self.differences.append(np.where(known, r, np.nan))
