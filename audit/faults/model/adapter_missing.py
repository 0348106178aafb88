"""The base alone, without the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.adapters import base_weights, predicted
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted
from ..planting.adapters import log_of, with_products, written

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The weights of the base."""
    if evidence.scorer.adapters:
        base = evidence.scorer.adapters.base
        yield predicted(
            evidence, f"the sampler computed with {base}, without the adapter", base_weights(evidence)
        )


def adapter_missing(w: World) -> Log:
    """An engine that never loaded the adapter."""
    adapter = written(w)
    return log_of(w, with_products(w, adapter.products, 0.0), adapter)


FAULT = Predicted(
    name="adapter missing",
    order=240,
    predict=predict,
    needs_decoder=True,
    remedy="Load the adapter into the sampler, or give it the merged weights, before it draws.",
    tries="the base alone, with `--adapter`",
    plants=(Plant(group="weights", make=adapter_missing),),
)
