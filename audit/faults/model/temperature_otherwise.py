"""The temperature twice, or multiplied in place of divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import under
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Both ways."""
    words = "the logits were {} by the temperature"
    for how, temperature in (
        ("divided twice", lambda t: t**2),
        ("multiplied, not divided,", lambda t: 1.0 / (t or 1.0)),
    ):
        scores = under(
            evidence,
            evidence.scorer.model(),
            lambda p, new=temperature: p._replace(temperature=new(p.temperature)),
        )
        if scores:
            yield Prediction(words.format(how), scores)


def divided_by_engine_and_by_server(w: World) -> Log:
    """The engine divides the logits, and a wrapper divides what it gets once more."""
    t = w.usual.temperature
    return w.log(w.both(w.drawn(reported=replace(w.raw, temperature=t * t))))


FAULT = Predicted(
    name="temperature applied otherwise",
    order=60,
    predict=predict,
    remedy="Divide the logits by it once.",
    tries="twice, and inverted",
    is_at_once=True,
    plants=(Plant(group="column", make=divided_by_engine_and_by_server),),
)
