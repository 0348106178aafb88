"""Which knob explains a column: all of them screened, the best ones refined, by layer, and two at once.

1. Every knob in all layers, on few tokens. Those that do the same are one class.
2. The best classes are refined, also in single layers and in kinds of layers; the best fits on more tokens.
3. Where none of them leaves rounding alone, a second knob is fitted on what the best ones leave. It is told
   where both leave clearly less than the best one alone.

A knob fits where the difference follows what it predicts with a slope of 1, far from 0 beside its error, and
what is left is the smaller part of the difference, and what bf16 rounds in a model with the knob: larger
weights and colder temperatures round more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from ...engine.display.progress import silent
from ..hypotheses.judgement import ERRORS, SECOND, SLOPE
from ..hypotheses.noise import Noise, is_rounding, weight
from ..hypotheses.slope import slope
from .forward import Tokens, chosen
from .knob import REFUSALS, Knob, Turn
from .knob_fit import Fitted, effect_on, refined, screened
from .knobs import knobs_of
from .module_places import Places
from .swaps import swaps_of

# Classes that are refined in all layers, and that are looked at by layer; leads by layer that are refined;
# leads that are fitted on all tokens; first and second knobs of pairs.
_REFINED, _LOOKED_AT, _BY_LAYER, _FINAL, _FIRSTS, _SECONDS = 4, 16, 8, 3, 2, 3
# Other operations that are fitted on all tokens; for the trial of them on very few: the weights of its
# forwards times their tokens (two minutes of a processor), the most and the fewest tokens, and the operations
# that few tokens try next.
_SWAPS, _SWAP_WORK, _SWAP_TOKENS, _SWAP_LEADS = 5, 5e12, (300, 100), 24
# Knobs whose values have nothing between them and the neutral one: each value is tried in each layer.
_TRIED_AS_SWAPS = ("clamp",)
# Layers up to which each is tried; of more, quarters are tried first.
_FEW_LAYERS = 8
# The cosine of two effects from which two knobs do the same; the share of what noise leaves up to which two
# fits cannot be told apart.
_SAME, _ALIKE = 0.995, 1.03
# Times the noise up to which rounding of one output may make the difference, and that a fit leaves at most.
# A wrong knob that takes a true one's place was seen to leave 1.7 times it, true ones 0.8 to 1.0.
_ROUNDS, _LEAVES = 1.5, 1.4
# The share of the difference that a fit leaves at most: of a difference that is little more than rounding,
# many knobs explain a part.
_SHARE = 0.4


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
    noise: Callable[[Sequence[Turn]], Noise]  # of a model with some knobs
    layer_types: Sequence[str] = ()
    stage: Callable[[str], None] = silent

    def answer(self) -> tuple[list[Answer], int]:
        """The best knobs, those that fit first, and how many were tried."""
        longest = max(len(x.prompt_ids) + len(x.completion_ids) for x in self.tokens.lines)
        rounds = self.few.left(self.few.base) <= _ROUNDS * self.noise(()).size
        swaps = list(swaps_of(self.places))
        knobs = [*knobs_of(self.places, longest, rounds), *(x for x in swaps if x.step)]
        fits = []
        for knob in (x for x in knobs if x.what not in _TRIED_AS_SWAPS):
            self.stage(f"trying a number at every operation: {knob.name}")
            if fit := screened(self.few, knob):
                fits.append(fit)
        classes = self._classes(sorted(fits, key=lambda x: x.left))
        leads = [x[0].last for x in classes[:_REFINED]] + self._layer_leads(
            [x[0] for x in classes[:_LOOKED_AT]]
        )
        small = sorted(self._all_refined(self.few, leads), key=lambda x: x.left)
        finalists = [x.last for x in _each_once(small)[:_FINAL]]
        others, tried = self._swapped([*swaps, *(x for x in knobs if x.what in _TRIED_AS_SWAPS)])
        tried |= {x.last.knob for x in fits}
        finalists += [x.last for x in others[:_SWAPS]]
        best = sorted(self._all_refined(self.tokens, finalists), key=lambda x: x.left)
        answers = self._answers(best, classes, [*knobs, *swaps], small)
        if small and not rounds and not any(x.fits for x in answers):
            answers += self._pairs(small, fits, min((x.left for x in best), default=np.inf))
        answers.sort(key=lambda x: (not x.fits, len(x.fit.turns), x.fit.left))
        return answers, len(tried)

    # --- another operation ---

    def _swapped(self, knobs: Sequence[Knob]) -> tuple[list[Fitted], set[Knob]]:
        """Knobs at their values in all layers and in each, the best first, and the knobs that were tried.

        They are tried on very few tokens, and the best on few. Those in all layers come first: a large model
        ends it before each layer is tried.
        """
        turns = sorted((x for knob in knobs for x in _turns_of(knob)), key=_is_of_some_layers)
        affordable = int(_SWAP_WORK / sum(x.numel() for x in self.few.model.parameters()))
        most, fewest = _SWAP_TOKENS
        each = affordable // max(1, sum(not _is_of_some_layers(x) for x in turns))
        each = min(most, max(fewest, each))
        turns = turns[: affordable // each]
        tiny = Tokens(self.few.model, chosen(self.few.lines, each))
        leads: list[tuple[float, Turn]] = []
        for knob, alike in groupby(turns, key=lambda x: x.knob):
            self.stage(f"trying another operation: {knob.name}")
            leads += [(fit.left, turn) for turn in alike if (fit := _at(tiny, turn))]
        tried = {x.knob for x in turns}
        leads.sort(key=lambda x: x[0])
        fits = [fit for _, turn in leads[:_SWAP_LEADS] if (fit := _at(self.few, turn))]
        return sorted(fits, key=lambda x: x.left), tried

    # --- one knob ---

    def _all_refined(self, tokens: Tokens, turns: Sequence[Turn]) -> list[Fitted]:
        return [x for turn in turns if (x := self._refined(tokens, turn))]

    def _refined(self, tokens: Tokens, turn: Turn, beside: tuple[Turn, ...] = ()) -> Fitted | None:
        self.stage(f"fitting a number at {turn.knob.name}")
        try:
            return refined(tokens, turn.knob, turn.layers, turn.value, beside)
        except REFUSALS:
            return None

    def _classes(self, fits: Sequence[Fitted]) -> list[list[Fitted]]:
        """Fits whose effects are alike, the best class first, and the best fit of each. fits: best first."""
        classes: list[list[Fitted]] = []
        for fit in fits:
            effect = self._effect(fit)
            same = next((x for x in classes if _cosine(self._effect(x[0]), effect) > _SAME), None)
            if same is None:
                classes.append([fit])
            else:
                same.append(fit)
        return classes

    def _effect(self, fit: Fitted) -> np.ndarray:
        """What a fit changes, over w, [N] of few tokens."""
        return effect_on(self.few, fit.scores)

    def _layer_leads(self, fits: Sequence[Fitted]) -> list[Turn]:
        """Knobs in one layer or in some, by what their slopes explain of few tokens; the best ones.

        Of small changes, the effect of several layers is the sum of their effects.
        """
        rows = []
        for fit in fits:
            knob = fit.last.knob
            if len(knob.place.layers) < 2:
                continue
            self.stage(f"fitting a number at {knob.name}, layer by layer")
            for layers, effect in self._effects_by_layer(fit.last):
                share, times = self._explained(effect)
                value = knob.neutral + times * knob.step if knob.step else fit.last.value
                rows.append((share, Turn(knob, value, layers)))
        return [turn for _, turn in sorted(rows, key=lambda x: -x[0])[:_BY_LAYER]]

    def _effects_by_layer(self, turn: Turn) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """The effect of a knob's step in each layer, and in groups of layers, [N] of few tokens."""
        knob, layers = turn.knob, turn.knob.place.layers
        value = knob.neutral + knob.step if knob.step else turn.value
        parts: dict[tuple[int, ...], np.ndarray] = {}

        def take(group: tuple[int, ...]) -> None:
            parts[group] = effect_on(self.few, self.few.scores((Turn(knob, value, group),)))

        if len(layers) > _FEW_LAYERS:
            for quarter in _quarters(layers):
                take(quarter)
            largest = max(parts, key=lambda x: self._explained(parts[x])[0])
            for layer in largest:
                take((layer,))
            for x in self._layer_types(layers):
                take(x)
            return list(parts.items())
        for layer in layers:
            take((layer,))
        half = len(layers) // 2
        groups = [*self._layer_types(layers), layers[::2], layers[1::2], layers[:half], layers[half:]]
        for group in dict.fromkeys(groups):
            if 1 < len(group) < len(layers):
                parts[group] = np.sum([parts[(layer,)] for layer in group], axis=0)
        return list(parts.items())

    def _layer_types(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The layers of each type, where the config names several."""
        types = dict(enumerate(self.layer_types))
        groups = [tuple(i for i in layers if types.get(i) == x) for x in dict.fromkeys(self.layer_types)]
        return [x for x in groups if 1 < len(x) < len(layers)]

    def _explained(self, effect: np.ndarray) -> tuple[float, float]:
        """The share of the squares of few tokens that an effect explains, and how many times it is taken."""
        r = np.nan_to_num(self.few.difference(self.few.base) / self.few.w)
        square = float((effect * effect).sum())
        if not square:
            return 0.0, 0.0
        return _cosine(effect, r) ** 2, float((effect * r).sum()) / square

    # --- what fits ---

    def _answers(
        self,
        best: Sequence[Fitted],
        classes: Sequence[Sequence[Fitted]],
        knobs: Sequence[Knob],
        small: Sequence[Fitted],
    ) -> list[Answer]:
        """The best fits, each with the knobs that do the same in the same layers, and with its other layers.

        small: fits of few tokens.
        """
        answers: list[Answer] = []
        for fit in best:
            if any(_is_told(fit, x) for x in answers):
                continue
            members = next((x for x in classes if any(y.last.knob is fit.last.knob for y in x)), [])
            first_turn = next((x.last for x in members if x.last.knob is fit.last.knob), fit.last)
            others = [self._as(x.last, first_turn, fit) for x in members if x.last.knob is not fit.last.knob]
            near = [x for x in best if x is not fit]
            kept = [x for x in (fit, *others, *near, *self._in_other_layers(fit, best, small)) if x]
            least = min(x.left for x in kept)
            alike = _each_once([x for x in kept if x.left <= _ALIKE * least])
            alike.sort(key=lambda x: (knobs.index(x.last.knob), x.left))
            if not any(_is_told(alike[0], x) for x in answers):
                answers.append(replace(self.judged(alike[0]), alike=tuple(alike[1:])))
        return answers

    def _in_other_layers(
        self, fit: Fitted, best: Sequence[Fitted], small: Sequence[Fitted]
    ) -> list[Fitted | None]:
        """The same knob in other layers that left as little of few tokens, fitted where `best` has it not."""
        done = {(x.last.knob, x.last.layers) for x in best}
        same = [x for x in small if x.last.knob is fit.last.knob]
        least = min((x.left for x in same), default=0.0)
        turns = [x.last for x in same if x.left <= _ALIKE * least]
        return [self._refined(self.tokens, x) for x in turns if (x.knob, x.layers) not in done]

    def _as(self, turn: Turn, first_turn: Turn, fit: Fitted) -> Fitted | None:
        """Another knob in the layers of a fit: at its value where both are one scale, else fitted.

        turn, first_turn: what the other knob, and the fit's, were on few tokens in all layers.
        """
        knob, last = turn.knob, fit.last
        layers = last.layers if set(last.layers) <= set(knob.place.layers) else knob.place.layers
        scales = ("scale", "scores", "values")
        is_one = abs(turn.value - first_turn.value) <= 0.02 * abs(first_turn.value)
        if is_one and {knob.what, last.knob.what} <= set(scales):
            turns = (Turn(knob, last.value, layers),)
            scores = self.tokens.scores(turns)
            return Fitted(turns, self.tokens.left(scores), scores, fit.error)
        return self._refined(self.tokens, Turn(knob, turn.value, layers))

    def judged(self, fit: Fitted) -> Answer:
        """Whether a fit is one: it explains, and leaves rounding."""
        t = self.tokens
        with np.errstate(invalid="ignore"):
            effect, r = fit.scores - t.base, t.difference(t.base)
        moved = np.where(t.known & np.isfinite(effect), effect, np.nan)
        angle, errors = slope(*(t.by_line(x) for x in (moved, r, t.base)))
        share = fit.left / t.left(t.base)
        follows = SLOPE[0] <= angle <= SLOPE[1] and errors >= ERRORS and share <= _SHARE
        fits = follows and leaves_rounding(self.noise(fit.turns), [(t, fit.scores)])
        return Answer(fit, (), bool(fits), angle, float(min(errors, 1e9)))

    # --- two at once ---

    def _pairs(self, best: Sequence[Fitted], fits: Sequence[Fitted], single: float) -> list[Answer]:
        """A second knob on what each of the best first ones leaves; the best pair.

        None where it leaves little less than `single`, what the best knob alone leaves of all tokens.
        """
        pairs = []
        for first in _each_kind(best)[:_FIRSTS]:
            r = np.nan_to_num(self.few.difference(first.scores) / self.few.w)
            leads = [x.last for x in fits] + [x.last for x in best if len(x.last.layers) == 1]
            leads = [x for x in leads if x.knob is not first.last.knob]
            effects = {id(x): self._small_effect(x) for x in leads}
            leads.sort(key=lambda x, r=r, effects=effects: -abs(_cosine(effects[id(x)], r)))
            for second in leads[:_SECONDS]:
                if both := self._together(first.last, second):
                    pairs.append(both)
        if not pairs:
            return []
        both = min(pairs, key=lambda x: x.left)
        first, second = both.turns
        again = self._refined(self.tokens, second, (first,))
        return [self.judged(again)] if again and again.left <= SECOND * single else []

    def _small_effect(self, turn: Turn) -> np.ndarray:
        """What a knob's step changes in the layers of a turn, [N] of few tokens."""
        knob = turn.knob
        value = knob.neutral + knob.step if knob.step else turn.value
        return effect_on(self.few, self.few.scores((Turn(knob, value, turn.layers),)))

    def _together(self, first: Turn, second: Turn) -> Fitted | None:
        """Two knobs, each fitted beside the other, on few tokens."""
        for _ in range(2):
            start = (
                second.value
                if second.value != second.knob.neutral
                else second.knob.neutral + second.knob.step
            )
            both = self._refined(self.few, replace(second, value=start), (first,))
            again = both and self._refined(self.few, first, (both.last,))
            if not again:
                return None
            first, second = again.last, both.last
        return Fitted((first, second), again.left, again.scores)


def leaves_rounding(noise: Noise, scored: Sequence[tuple[Tokens, np.ndarray]]) -> bool:
    """Whether what scores leave of some tokens is what a sampler rounds, in all of their lines."""
    left, logp = [], []
    for t, scores in scored:
        gaps = np.where(t.known, t.gaps(scores), np.nan)
        for known, d, x in zip(*map(t.by_line, (t.known, gaps, np.nan_to_num(scores))), strict=True):
            if known.any():
                left.append(d)
                logp.append(x)
    if not left:
        return False
    mean = np.nanmean(np.concatenate(left) / weight(np.concatenate(logp)))
    return bool(mean <= _LEAVES * noise.size and is_rounding(noise, left, logp, signed=False))


def _turns_of(knob: Knob) -> Iterator[Turn]:
    """A knob at each of its values, in each layer and, of a swap, in all of them."""
    layers = knob.place.layers
    groups = [(i,) for i in layers]
    if knob.names_layers:
        groups = [layers]
    elif knob.what in ("swap", "mask") and len(layers) > 1:
        groups.append(layers)
    return (Turn(knob, value, group) for group in groups for value in knob.values)


def _is_of_some_layers(turn: Turn) -> bool:
    """Whether a turn is not the same in all layers."""
    return turn.knob.names_layers or not turn.is_everywhere


def _at(tokens: Tokens, turn: Turn) -> Fitted | None:
    """A turn as it is; None where the model's modules do not take it."""
    try:
        scores = tokens.scores((turn,))
    except REFUSALS:
        return None
    return Fitted((turn,), tokens.left(scores), scores)


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
    """The first fit of each knob in each set of layers."""
    return list({(x.last.knob, x.last.layers): x for x in reversed(fits)}.values())[::-1]


def _each_kind(fits: Sequence[Fitted]) -> list[Fitted]:
    """The best fit of each knob."""
    by_knob = groupby(sorted(fits, key=lambda x: id(x.last.knob)), key=lambda x: id(x.last.knob))
    return sorted((min(group, key=lambda x: x.left) for _, group in by_knob), key=lambda x: x.left)
