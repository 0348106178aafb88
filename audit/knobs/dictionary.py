"""What a knob's value usually means: numbers that are known from models and engines, with their words."""

import math
from collections.abc import Iterator
from typing import Any

from .knob import Turn
from .knob_fit import Fitted

# Scalings of YaRN and of linear interpolation that models ship with.
_SCALINGS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
# A value is near a known one up to so many of its errors, and within these shares of the known one (of 1
# where that is 0): the least, since an error counts chance alone, and the most.
_ERRORS, _LEAST, _MOST = 3.0, 0.002, 0.02


def meaning(fit: Fitted, config: Any, lm_head: str) -> str:
    """What the value of the last knob usually means, in words; empty where it is no known number.

    config: of the model in transformers. lm_head: the kind of the module that makes the logits.
    """
    turn = fit.last
    if turn.knob.what == "scale" and turn.knob.place.kind == lm_head:
        is_other = turn.value and abs(turn.value - 1.0) > _ERRORS * fit.error
        return f"as a temperature of {1 / turn.value:.3g} is" if is_other else ""
    gaps = [(abs(turn.value - x), x, words) for x, words in _known(turn, config)]
    near = [x for x in gaps if x[0] <= _room(fit, x[1])]
    if not near:
        return ""
    gap, known, words = min(near)
    return f"near {known:.4g}, {words}" if gap else words


def _room(fit: Fitted, known: float) -> float:
    """How far a value may be from a known one. A search without a slope has no error, and goes so far."""
    size = abs(known) or 1.0
    if not fit.last.knob.step:
        return _MOST * size
    return min(max(_ERRORS * fit.error, _LEAST * size), _MOST * size)


def _known(turn: Turn, config: Any) -> Iterator[tuple[float, str]]:
    """Known values of a knob, each with its words."""
    what, place = turn.knob.what, turn.knob.place
    if what == "scores" and turn.is_everywhere:
        for s in _SCALINGS:
            factor = (0.1 * math.log(s) + 1.0) ** 2
            yield factor, f"YaRN's attention factor for a scaling of {s:g}, squared"
            yield 1 / factor, f"without YaRN's attention factor for a scaling of {s:g}"
        head = _head_dim(config)
        yield head**0.5, "without the division by the root of the head's width"
        yield head**-0.5, "divided by the root of the head's width twice"
    if what == "positions":
        for s in _SCALINGS:
            yield 1 / s, f"linear scaling by {s:g}"
            yield s, f"without linear scaling by {s:g}"
    if what == "scale":
        yield 0.0, "left out"
        if place.is_embedding:
            D = config.hidden_size
            yield D**0.5, "the root of the width: Gemma's scale of embeddings"
            yield D**-0.5, "without the root of the width: Gemma's scale of embeddings"
    if what == "values":
        yield 0.0, "left out"
    if what == "shift":
        yield 1.0, "1 + w: Gemma's norms"
        yield -1.0, "w in place of Gemma's 1 + w"
    if what == "epsilon":
        yield from ((x, "a usual one of other families") for x in _EPSILONS)
    if what == "reach" and (window := getattr(config, "sliding_window", None)):
        yield float(window), "the config's sliding_window"
    if what == "cap" and (cap := getattr(config, "attn_logit_softcapping", None)):
        yield float(cap), "the config's attn_logit_softcapping"
    if what == "offset":
        yield 2.0, "OPT's offset of positions"


def _head_dim(config: Any) -> float:
    return float(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
