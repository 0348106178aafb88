"""Another temperature than the log says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import searched
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_TEMPERATURES = np.geomspace(0.1, 4.0, 25)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The temperature is searched."""
    rows = evidence.scorer.rows(evidence)
    t, scores, tried = searched(rows, _TEMPERATURES, None, lambda p, t: p._replace(temperature=t))
    yield Prediction(f"the sampler's temperature was {t:.3g}", scores, tried, params={"temperature": t})


def an_odd_temperature(w: World) -> Log:
    """A little above the one that is declared."""
    return w.sampler(drawn=replace(w.usual, temperature=w.uniform(0.84, 0.93)))


FAULT = Predicted(
    name="another temperature",
    order=70,
    predict=predict,
    remedy="Give the sampler and the trainer the same temperature, top-p and top-k. Where they are the same, "
    "one scales its logits or its head: no log tells the two apart.",
    tries="a search for the value",
    is_second=True,
    perturb=("temperature",),
    plants=(Plant(group="settings", make=an_odd_temperature),),
)
