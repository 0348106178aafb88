"""Which knob explains a column: all of them screened, the best ones refined, by layer, and two at once.

1. Every knob in all layers, on few tokens. Those that do the same are one class.
2. The best classes are refined on more tokens, then by kinds of layers and by single layers.
3. Where none of them leaves rounding alone, a second knob is fitted on what the best ones leave.

A knob fits as a hypothesis does (hypotheses/fit.py): the difference follows what it predicts with a slope of
1, far from 0 beside its error, and what is left is rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from ...engine.display.progress import silent
from ..hypotheses.judgement import ERRORS, EXACT, LESS, SLOPE
from ..hypotheses.noise import Noise, is_rounding
from ..hypotheses.slope import slope
from .fit import REFUSALS, Fitted, layer_slope, refined, screened
from .forward import Tokens
from .knob import Knob, Turn
from .knobs import knobs_of
from .places import Places

# Classes that are refined, that are refined by layer, and first and second knobs of pairs.
_REFINED, _BY_LAYER, _FIRSTS, _SECONDS = 6, 4, 3, 4
# Layers up to which each is tried; of more, quarters are tried first.
_FEW_LAYERS = 8
# The cosine of two effects from which two knobs do the same; the share of what noise leaves up to which two
# fits cannot be told apart.
_SAME, _ALIKE = 0.98, 1.03
# The share of the difference that a knob leaves at most to be worth a second look.
_PROMISE = 0.97


@dataclass(frozen=True)
class Answer:
    """A knob, or two at once. alike: turns of which each stands for the last one as well as it does."""

    fit: Fitted
    alike: tuple[Fitted, ...]
    fits: bool
    slope: float
    errors: float  # by which the slope is away from 0


@dataclass(frozen=True)
class Knobs:
    """The search over one column. few: the tokens of the screen, a part of all."""

    few: Tokens
    tokens: Tokens
    places: Places
    noise: Noise
    layer_types: Sequence[str] = ()
    stage: Callable[[str], None] = silent

    def answer(self) -> tuple[list[Answer], int]:
        """The best knobs, those that fit first, and how many were tried; none where none promises."""
        longest = max(len(x.prompt_ids) + len(x.completion_ids) for x in self.tokens.lines)
        knobs = list(knobs_of(self.places, longest))
        fits = []
        for knob in knobs:
            self.stage(f"trying a number at every operation: {knob.name}")
            if (fit := screened(self.few, knob)) and fit.left < _PROMISE * self.few.left(self.few.base):
                fits.append(fit)
        classes = self._classes(sorted(fits, key=lambda x: x.left), knobs)
        refined_fits = [x for members in classes[:_REFINED] if (x := self._refined(members[0].last))]
        by_layer = []
        for members in classes[:_BY_LAYER]:
            by_layer += self._in_layers(members[0].last.knob)
        best = sorted([*refined_fits, *by_layer], key=lambda x: x.left)
        answers = self._answers(best, classes, knobs)
        if best and not any(x.fits for x in answers):
            answers += self._pairs(best, fits)
        return sorted(answers, key=lambda x: (not x.fits, len(x.fit.turns), x.fit.left)), len(knobs)

    # --- one knob ---

    def _refined(self, turn: Turn, beside: tuple[Turn, ...] = ()) -> Fitted | None:
        self.stage(f"fitting a number at {turn.knob.name}")
        try:
            return refined(self.tokens, turn.knob, turn.layers, turn.value, beside)
        except REFUSALS:
            return None

    def _classes(self, fits: Sequence[Fitted], knobs: Sequence[Knob]) -> list[list[Fitted]]:
        """Fits whose effects are alike, the best class first, the simplest knob of each first."""
        classes: list[list[Fitted]] = []
        for fit in fits:
            effect = self._effect(fit)
            same = next((x for x in classes if _cosine(self._effect(x[0]), effect) > _SAME), None)
            if same is None:
                classes.append([fit])
            else:
                same.append(fit)
        return [sorted(x, key=lambda fit: knobs.index(fit.last.knob)) for x in classes]

    def _effect(self, fit: Fitted) -> np.ndarray:
        d = (fit.scores - self.few.base) / self.few.w
        return np.where(self.few.known & np.isfinite(d), d, 0.0)

    def _in_layers(self, knob: Knob, beside: tuple[Turn, ...] = ()) -> list[Fitted]:
        """The knob in one kind of layer, and in one layer: the best ones."""
        if len(knob.place.layers) < 2:
            return []
        self.stage(f"fitting a number at {knob.name}, layer by layer")
        groups = list(self._groups(knob.place.layers))
        if len(knob.place.layers) > _FEW_LAYERS:
            quarters = self._ranked(knob, list(_quarters(knob.place.layers)), beside)[:1]
            groups += [(layer,) for _, _, part in quarters for layer in part] + [x for _, _, x in quarters]
        else:
            groups += [(layer,) for layer in knob.place.layers]
        ranked = self._ranked(knob, groups, beside)[:2]
        fits = (self._refined(Turn(knob, value, layers), beside) for _, value, layers in ranked)
        return [x for x in fits if x]

    def _groups(self, layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Layers of one type, where the config names several; every other layer; both halves."""
        types = {
            x: tuple(i for i in layers if i < len(self.layer_types) and self.layer_types[i] == x)
            for x in dict.fromkeys(self.layer_types)
        }
        half = len(layers) // 2
        groups = [*types.values(), layers[::2], layers[1::2], layers[:half], layers[half:]]
        yield from (x for x in dict.fromkeys(groups) if 1 < len(x) < len(layers))

    def _ranked(
        self, knob: Knob, groups: Sequence[tuple[int, ...]], beside: tuple[Turn, ...]
    ) -> list[tuple[float, float, tuple[int, ...]]]:
        """The groups by what their slope explains of few tokens, with the value that it leads to."""
        rows = []
        for layers in groups:
            share, value = layer_slope(self.few, knob, layers, beside)
            rows.append((share, value, layers))
        return sorted(rows, key=lambda x: -x[0])

    # --- what fits ---

    def _answers(
        self, best: Sequence[Fitted], classes: Sequence[Sequence[Fitted]], knobs: Sequence[Knob]
    ) -> list[Answer]:
        """The best fits, each with the knobs that do the same in the same layers."""
        answers: list[Answer] = []
        for fit in best[:_FIRSTS]:
            if any(_is_told(fit, x) for x in answers):
                continue
            members = next((x for x in classes if any(y.last.knob is fit.last.knob for y in x)), [])
            others = [self._as(x.last.knob, fit) for x in members if x.last.knob is not fit.last.knob]
            near = [x for x in best if x is not fit and x.last.knob is not fit.last.knob]
            every = [fit, *(x for x in (*others, *near) if x and x.left <= _ALIKE * fit.left)]
            every = sorted(
                every, key=lambda x: (x.left > _ALIKE * min(y.left for y in every), knobs.index(x.last.knob))
            )
            answers.append(replace(self.judged(every[0]), alike=tuple(_each_once(every[1:]))))
        return answers

    def _as(self, knob: Knob, fit: Fitted) -> Fitted | None:
        """Another knob in the layers of a fit."""
        layers = fit.last.layers if set(fit.last.layers) <= set(knob.place.layers) else knob.place.layers
        value = fit.last.value if knob.step else knob.values[0]
        return self._refined(Turn(knob, value, layers))

    def judged(self, fit: Fitted) -> Answer:
        """Whether a fit is one: it explains, and leaves rounding."""
        t = self.tokens
        with np.errstate(invalid="ignore"):
            effect, r = fit.scores - t.base, t.difference(t.base)
        moved = np.where(t.known & np.isfinite(effect), effect, np.nan)
        angle, errors = slope(*(t.by_line(x) for x in (moved, r, t.base)))
        share = fit.left / t.left(t.base)
        left = [
            np.where(k, x, np.nan)
            for k, x in zip(t.by_line(t.known), t.by_line(t.difference(fit.scores)), strict=True)
        ]
        left = [x for x in left if not np.isnan(x).all()]
        base = [x for x, y in zip(t.by_line(t.base), t.by_line(t.known), strict=True) if y.any()]
        follows = SLOPE[0] <= angle <= SLOPE[1] and errors >= ERRORS and share <= LESS
        fits = share <= EXACT or (follows and is_rounding(self.noise, left, base, signed=False))
        return Answer(fit, (), bool(fits and follows), angle, float(min(errors, 1e9)))

    # --- two at once ---

    def _pairs(self, best: Sequence[Fitted], fits: Sequence[Fitted]) -> list[Answer]:
        """A second knob on what each of the best first ones leaves."""
        answers = []
        for first in _each_kind(best)[:_FIRSTS]:
            beside = first.turns
            on_few = self.few.scores(beside)
            r = np.nan_to_num(self.few.difference(on_few) / self.few.w)
            others = [x for x in fits if x.last.knob is not first.last.knob]
            seconds = sorted(others, key=lambda x, r=r: -abs(_cosine(self._effect(x), r)))[:_SECONDS]
            for second in seconds:
                both = self._together(first.last, second.last.knob)
                if both:
                    answers.append(self.judged(both))
        return sorted(answers, key=lambda x: (not x.fits, x.fit.left))[:1]

    def _together(self, first: Turn, knob: Knob) -> Fitted | None:
        """Two knobs, each fitted beside the other."""
        start = screened(self.few, knob, (first,))
        if not start or not (both := self._refined(start.last, (first,))):
            return None
        again = self._refined(first, (both.last,))
        return (again and self._refined(both.last, (again.last,))) or both


def _quarters(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    size = -(-len(layers) // 4)
    yield from (layers[i : i + size] for i in range(0, len(layers), size))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size else 0.0


def _is_told(fit: Fitted, answer: Answer) -> bool:
    """Whether an answer holds a fit already."""
    turns = {(x.last.knob, x.last.layers) for x in (answer.fit, *answer.alike)}
    return (fit.last.knob, fit.last.layers) in turns


def _each_once(fits: Sequence[Fitted]) -> list[Fitted]:
    return list({(x.last.knob, x.last.layers): x for x in fits}.values())


def _each_kind(fits: Sequence[Fitted]) -> list[Fitted]:
    """The best fit of each knob."""
    by_knob = groupby(sorted(fits, key=lambda x: id(x.last.knob)), key=lambda x: id(x.last.knob))
    return sorted((min(group, key=lambda x: x.left) for _, group in by_knob), key=lambda x: x.left)
