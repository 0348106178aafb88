"""A cut that is applied, and a temperature that is not."""

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
    """The cut is applied, the temperature is not."""
    if not any(p.cuts for p in evidence.params()):
        return
    scores = under(evidence, evidence.scorer.model(), lambda p: p._replace(temperature=1.0))
    if scores:
        yield Prediction("the temperature is not in the logged log-probabilities, the cut is", scores)


def cut_before_the_temperature(w: World) -> Log:
    """A sampler that reports the kept set's log-softmax of the raw logits."""
    s = replace(w.usual, top_k=20)
    return w.log(w.both(w.drawn(s, reported=replace(w.raw, top_k=20)), s), s)


FAULT = Predicted(
    name="temperature not applied",
    order=30,
    predict=predict,
    remedy="Let the sampler report processed log-probabilities (vLLM: logprobs_mode='processed_logprobs'), "
    "and apply the same temperature, top-p and top-k in the trainer.",
    tries="the cut alone",
    is_at_once=True,
    plants=(Plant(group="column", make=cut_before_the_temperature),),
)
