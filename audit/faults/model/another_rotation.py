"""Another base of the rotary embedding, or no scaling of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ....model.config import ModelConfig
from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_config
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Bases of the rotary embedding of the supported families.
_THETAS = (1e4, 1e5, 5e5, 1e6)
# Of the search for a base: lines, its ends, and how often the step is halved.
_FEW, _LOW, _HIGH, _ROUNDS = 6, 1e3, 1e7, 8


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Another base of the rotary embedding, usual ones and a searched one, or no scaling of it."""
    config = evidence.scorer.model().config
    for theta in dict.fromkeys((*_THETAS, config.rope_theta / 2, config.rope_theta * 2)):
        if theta != config.rope_theta:
            what = f"the sampler's rope_theta is {theta:g}, the checkpoint's {config.rope_theta:g}"
            yield with_config(evidence, what, rope_theta=theta)
    if config.rope_scaling is not None:
        what = "the sampler leaves out the checkpoint's rope_scaling"
        yield with_config(evidence, what, rope_scaling=None)
        for theta in _THETAS:
            if theta != config.rope_theta:
                words = f"{what}, and its rope_theta is {theta:g}"
                yield with_config(evidence, words, rope_scaling=None, rope_theta=theta)
    theta, tried = _nearest_theta(evidence, config)
    if theta != config.rope_theta:
        what = f"the sampler's rope_theta is about {theta:.2g}, the checkpoint's {config.rope_theta:g}"
        yield replace(with_config(evidence, what, rope_theta=theta), choices=tried)


def _nearest_theta(evidence: Evidence, config: ModelConfig) -> tuple[float, int]:
    """The base that comes nearest to the log, searched on a few lines, and of how many."""
    few = replace(evidence, lines=evidence.lines[:: max(1, len(evidence.lines) // _FEW)][:_FEW])
    tried: dict[float, float] = {}

    def loss(theta: float) -> float:
        if theta not in tried:
            scores = with_config(few, "", rope_theta=theta).scores
            gaps = [np.abs(x.logged - scores[i]) for i, x in enumerate(few.lines)]
            tried[theta] = sum(float(np.nansum(np.minimum(gap, 1.0))) for gap in gaps)
        return tried[theta]

    points = [config.rope_theta, *np.geomspace(_LOW, _HIGH, 9).tolist()]
    for _ in range(_ROUNDS):
        min(points, key=loss)
        known = sorted(tried)
        i = known.index(min(known, key=loss))
        ends = known[max(i - 1, 0)], known[min(i + 1, len(known) - 1)]
        points = [math.sqrt(known[i] * end) for end in ends if end != known[i]]
    return min(points + list(tried), key=loss), len(tried)


def rope_scaling_and_theta_lost(w: World) -> Log:
    """An engine that reads neither of the two fields."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return w.sampler(w.model(rope_parameters=rope))


def another_rope_theta(w: World) -> Log:
    """A base that is in no list."""
    rope = dict(w.fp32.config.rope_parameters)
    rope["rope_theta"] = float(round(rope["rope_theta"] * w.uniform(0.3, 0.6)))
    return w.sampler(w.model(rope_parameters=rope))


FAULT = Predicted(
    name="another rotary embedding",
    order=340,
    predict=predict,
    needs_decoder=True,
    remedy="Compare rope_theta and rope_scaling of both configurations.",
    tries="usual values of `rope_theta` and a searched one, no `rope_scaling`, both at once",
    is_late=True,
    plants=(
        Plant(group="attention", make=rope_scaling_and_theta_lost, named=("rotary",)),
        Plant(group="attention", make=another_rope_theta, named=("rotary",)),
    ),
)
