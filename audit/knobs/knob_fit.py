"""One knob, fitted to a column: a slope by differences, then steps of Gauss-Newton on the true forward.

    J = (s(v + h) - s(v)) / h,   v <- v + sum J r / sum J^2,   r = logged - s(v)     both over w of noise.py

A slope says little of a large change, so usual values are tried as well. A number without a slope (a window,
a cap, an epsilon, a rounding) is chosen among its values and searched between the best one's neighbours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .forward import Tokens
from .knob import REFUSALS, Knob, Turn

# Times the median |r| beyond which a token counts no more: a few tokens must not decide a slope.
_OUTLIER = 6.0
# From this distance from neutral on, a slope is trusted less, and usual values are tried beside it.
_FAR = 0.2
_STEPS = 3


@dataclass(frozen=True)
class Fitted:
    """Knobs at the values that leave least. left: as Tokens.left; error: of the last knob's value."""

    turns: tuple[Turn, ...]
    left: float
    scores: np.ndarray  # [N]
    error: float = 0.0

    @property
    def last(self) -> Turn:
        """The knob that was fitted last."""
        return self.turns[-1]


@dataclass(frozen=True)
class _Search:
    """The fit of one knob beside others."""

    tokens: Tokens
    knob: Knob
    layers: tuple[int, ...]
    beside: tuple[Turn, ...]

    def turned_to(self, value: float) -> Fitted:
        """The knob at a value."""
        value = min(max(value, self.knob.low), self.knob.high)
        value = float(round(value)) if self.knob.is_whole else value
        turns = (*self.beside, Turn(self.knob, value, self.layers))
        scores = self.tokens.scores(turns)
        return Fitted(turns, self.tokens.left(scores), scores)

    def slope(self, now: Fitted, step: float) -> np.ndarray:
        """d scores / d value over w, [N]; NaN where it is unknown."""
        value = now.last.value if now.turns and now.last.knob is self.knob else self.knob.neutral
        forth = step if value + step <= self.knob.high else -step
        ahead = self.turned_to(value + forth)
        with np.errstate(invalid="ignore"):
            return (ahead.scores - now.scores) / forth / self.tokens.w

    def newton(self, now: Fitted, J: np.ndarray) -> float:
        """The step of Gauss-Newton; 0 where the knob changes nothing."""
        r = self.tokens.difference(now.scores) / self.tokens.w
        known = self.tokens.known & np.isfinite(J) & np.isfinite(r)
        J, r = J[known], r[known]
        square = float((J * J).sum())
        if not len(r) or square < 1e-12 * len(r):
            return 0.0
        most = _OUTLIER * float(np.median(np.abs(r))) + 1e-9
        return float((J * np.clip(r, -most, most)).sum()) / square


def screened(tokens: Tokens, knob: Knob) -> Fitted | None:
    """The knob in all layers, at the best of few values; None where it changes nothing or cannot turn."""
    search = _Search(tokens, knob, knob.place.layers, ())
    try:
        if not knob.step:
            return _least(search.turned_to, knob.values)
        start = Fitted((), tokens.left(tokens.base), tokens.base)
        step = search.newton(start, search.slope(start, knob.step))
        if not step:
            return None
        values = [knob.neutral + step]
        if abs(step) > _FAR * max(1.0, abs(knob.neutral)):
            values += [knob.neutral + step / 3, *knob.values]
        return _least(search.turned_to, values)
    except REFUSALS:
        return None


def refined(
    tokens: Tokens, knob: Knob, layers: tuple[int, ...], start: float, beside: tuple[Turn, ...] = ()
) -> Fitted:
    """The knob in some layers, from a value on."""
    search = _Search(tokens, knob, layers, beside)
    if not knob.step:
        return _between(search, start)
    best, J = search.turned_to(start), None
    for _ in range(_STEPS):
        J = search.slope(best, _step_at(knob, best.last.value))
        moved = search.newton(best, J)
        if abs(moved) < 1e-4 * max(1.0, abs(best.last.value)):
            break
        trials = (search.turned_to(best.last.value + moved * share) for share in (1.0, 0.4))
        better = next((x for x in trials if x.left < best.left), None)
        if better is None:
            break
        best = better
    return Fitted(best.turns, best.left, best.scores, _error(tokens, best, J))


def effect_on(tokens: Tokens, scores: np.ndarray) -> np.ndarray:
    """What scores differ by from the model's own, over w, [N]; 0 where it is unknown."""
    d = (scores - tokens.base) / tokens.w
    return np.where(tokens.known & np.isfinite(d), d, 0.0)


def _step_at(knob: Knob, value: float) -> float:
    return knob.step * min(max(abs(value), 0.2), 4.0) if knob.neutral else knob.step


def _error(tokens: Tokens, best: Fitted, J: np.ndarray | None) -> float:
    """The standard error of a value, from what is left."""
    if J is None:
        return 0.0
    d = tokens.difference(best.scores) / tokens.w
    known = tokens.known & np.isfinite(J) & np.isfinite(d)
    square = float((J[known] ** 2).sum())
    return math.sqrt(float((d[known] ** 2).mean()) / square) if square else 0.0


def _least(turned_to: Callable[[float], Fitted], values: Sequence[float]) -> Fitted:
    return min((turned_to(x) for x in values), key=lambda x: x.left)


def _between(search: _Search, start: float) -> Fitted:
    """The best value about `start`: whole numbers one by one, others by their ratio."""
    knob, best = search.knob, search.turned_to(start)
    if knob.values == (1.0,):
        return best
    width = max(1.0, abs(start) / 2) if knob.is_whole else 4.0
    for _ in range(12):
        value = best.last.value
        around = (value - width, value + width) if knob.is_whole else (value / width, value * width)
        better = _least(search.turned_to, around)
        if better.left < best.left:
            best = better
        elif knob.is_whole and width <= 1.0:
            break
        else:
            width = float(math.ceil(width / 2)) if knob.is_whole and width > 1.0 else width**0.5
        if not knob.is_whole and width < 1.01:
            break
    return best
