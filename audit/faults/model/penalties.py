"""A repetition, presence or frequency penalty that only one side applies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import searched
from ...hypotheses.penalties import frequency, presence, repetition
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_REPETITION = np.array([0.8, 0.9, 0.95, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0])
_PRESENCE = np.array([-1.0, -0.5, -0.2, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0])


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The value of each is searched."""
    rows = evidence.scorer.rows(evidence)
    for words, transform, grid in (
        ("repetition penalty", repetition, _REPETITION),
        ("presence penalty", presence, _PRESENCE),
        ("frequency penalty", frequency, _PRESENCE),
    ):
        x, scores, tried = searched(rows, grid, transform)
        yield Prediction(f"the sampler applies a {words} of {x:.3g}", scores, tried)


def repetition_penalty(w: World) -> Log:
    """As Qwen's generation_config.json asks for."""
    return w.sampler(drawn=replace(w.usual, repetition=w.uniform(1.08, 1.25)))


def presence_penalty(w: World) -> Log:
    """A token of the completion once more."""
    return w.sampler(drawn=replace(w.usual, presence=w.uniform(0.4, 0.9)))


def frequency_penalty(w: World) -> Log:
    """A token of the completion as often as it was drawn."""
    return w.sampler(drawn=replace(w.usual, frequency=w.uniform(0.2, 0.5)))


FAULT = Predicted(
    name="penalties",
    order=100,
    predict=predict,
    remedy="Switch repetition, presence and frequency penalties off in the sampler: a trainer that scores "
    "all tokens at once does not have them.",
    tries="a repetition, presence or frequency penalty; the value is searched",
    is_second=True,
    plants=(
        Plant(group="settings", make=repetition_penalty, named=("repetition penalty", "penalties")),
        Plant(group="settings", make=presence_penalty, named=("presence", "penalties")),
        Plant(group="settings", make=frequency_penalty, named=("frequency", "penalties")),
    ),
)
