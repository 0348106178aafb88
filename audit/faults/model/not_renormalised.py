"""Probabilities over the whole vocabulary, where tokens were drawn from a kept set."""

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
    """The temperature is applied; probabilities are over the whole vocabulary, not over the kept set."""
    scores = under(evidence, evidence.scorer.model(), lambda p: p.uncut)
    if scores:
        what = (
            "the logged log-probabilities are over the whole vocabulary, not over the tokens that were kept"
        )
        yield Prediction(what, scores)


def trainer_without_top_p(w: World) -> Log:
    """A trainer that applies the temperature alone."""
    s = replace(w.usual, top_p=w.uniform(0.85, 0.93))
    return w.log(w.both(w.drawn(s), w.usual), s)


_TRAINER = ("trainer without top-p", "not renormalised", "trainer column, raw logits")

FAULT = Predicted(
    name="top-p and top-k not renormalised",
    order=40,
    predict=predict,
    remedy="Let the sampler report processed log-probabilities (vLLM: logprobs_mode='processed_logprobs'), "
    "and apply the same temperature, top-p and top-k in the trainer.",
    tries="the temperature alone",
    known_from=("huggingface/trl#6789",),
    is_at_once=True,
    plants=(Plant(group="column", make=trainer_without_top_p, named=_TRAINER),),
)
