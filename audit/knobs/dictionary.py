"""What a knob's value usually means: numbers that are known from models and engines, with their words."""

import math
from collections.abc import Iterator
from typing import Any

from .fit import Fitted
from .knob import Turn

# Scalings of YaRN and of linear interpolation that models ship with.
_SCALINGS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
# A value is a known one up to so many of its errors, and up to such a share of it in any case.
_ERRORS, _SHARE = 3.0, 0.02


def meaning(fit: Fitted, config: Any) -> str:
    """What the value of the last knob usually means, in words; empty where it is no known number.

    config: of the model in transformers.
    """
    turn = fit.last
    if turn.knob.what == "scale" and _is_temperature(turn):
        return f"as a temperature of {1 / turn.value:.3g} is" if turn.value else ""
    room = max(_SHARE * abs(turn.value), _ERRORS * fit.error)
    near = [(abs(turn.value - x), words) for x, words in _known(turn, config) if abs(turn.value - x) <= room]
    return min(near)[1] if near else ""


def _is_temperature(turn: Turn) -> bool:
    """Whether the scale is that of the logits, or of the last norm before them."""
    return turn.knob.place.layers == (-1,) and not turn.knob.place.is_embedding


def _known(turn: Turn, config: Any) -> Iterator[tuple[float, str]]:
    """Known values of a knob, each with its words."""
    what, place = turn.knob.what, turn.knob.place
    if what == "scores" and turn.is_everywhere:
        for s in _SCALINGS:
            factor = (0.1 * math.log(s) + 1.0) ** 2
            yield factor, f"as YaRN's attention factor for a scaling of {s:g} is, squared"
            yield 1 / factor, f"as without YaRN's attention factor for a scaling of {s:g}"
        head = _head_dim(config)
        yield head**0.5, "as without the division by the root of the head's width"
        yield head**-0.5, "as divided by the root of the head's width twice"
    if what == "positions":
        for s in _SCALINGS:
            yield 1 / s, f"as linear scaling by {s:g} is"
            yield s, f"as without linear scaling by {s:g}"
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
