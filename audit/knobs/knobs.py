"""All knobs of a model."""

from collections.abc import Iterator

import torch

from .knob import Knob
from .module_places import Place, Places

# Values that a search begins with, beside those that a slope leads to.
_SCALES = (0.0, 0.5, 2.0)
_EPSILONS = (1e-3, 1e-1)
_REACHES = (4, 16, 64, 256, 1024)
_CLAMPS = (0.25, 1.0, 4.0, 16.0)
_CAPS = (1.0, 5.0, 30.0)
_STRETCHES = (0.125, 0.25, 0.5, 2.0, 4.0)
_BASES = (0.01, 0.1, 0.5, 2.0, 10.0, 100.0)
_OFFSETS = (-2, -1, 1, 2, 3, 4)
_LARGEST = 64.0  # of a scale
# What a constant on the output means something for: gates, routers and what goes into them.
_BIASED = ("gate", "up_proj", "router", "fc", "h_to_4h", "dt_proj", "conv1d", "w1", "w3")


def knobs_of(places: Places, longest: int, rounds: bool) -> Iterator[Knob]:
    """The knobs of a model, the simple ones first.

    longest: tokens of a sequence at most. rounds: whether rounding an output to bf16 may make the difference.
    """
    yield from (Knob(x, "skip", 1.0, _SCALES, 0.05, -4.0, 4.0) for x in places.blocks if x.kind == "layer")
    modules = sorted(places.modules, key=lambda x: x.kind != places.lm_head)
    yield from (_scale(x, "scale") for x in modules[:1])
    for place in places.attention:
        yield _scale(place, "scores")
        yield _scale(place, "values")
        reaches = tuple(float(x) for x in _REACHES if x < longest)
        if reaches:
            yield Knob(place, "reach", 0.0, reaches, 0.0, 1.0, float(longest), is_whole=True)
        yield Knob(place, "cap", 0.0, _CAPS, 0.0, 0.1, 1e3)
    for place in places.rotations:
        yield Knob(place, "positions", 1.0, _STRETCHES, 0.02, 0.0, 16.0)
        yield Knob(place, "base", 1.0, _BASES, 0.1, 1e-3, 1e3)
    yield from (_scale(x, "scale") for x in modules[1:])
    for place in modules:
        yield from _others(place, rounds)


def _scale(place: Place, what: str) -> Knob:
    return Knob(place, what, 1.0, _SCALES, 0.05, 0.0, _LARGEST)


def _others(place: Place, rounds: bool) -> Iterator[Knob]:
    """The knobs of a module but for its scale."""
    if place.is_norm:
        if isinstance(place.weight, torch.Tensor):
            yield Knob(place, "shift", 0.0, (-1.0, 1.0), 0.05, -4.0, 4.0)
        yield Knob(place, "epsilon", float(getattr(place.first, place.eps)), _EPSILONS, 0.0, 1e-12, 10.0)
    elif any(x in place.kind for x in _BIASED):
        yield Knob(place, "bias", 0.0, (-1.0, 1.0), 0.05, -8.0, 8.0)
    if place.is_embedding and place.kind in ("wpe", "embed_positions", "position_embeddings"):
        yield Knob(place, "offset", 0.0, tuple(map(float, _OFFSETS)), 0.0, -8.0, 8.0, is_whole=True)
    yield Knob(place, "clamp", 0.0, _CLAMPS, 0.0, 0.05, 1e3)
    yield Knob(place, "fp8 output", 0.0, (1.0,), 0.0)
    if rounds:
        yield Knob(place, "bf16 output", 0.0, (1.0,), 0.0)
    if place.is_matrix:
        yield Knob(place, "fp8 weight", 0.0, (1.0,), 0.0)
