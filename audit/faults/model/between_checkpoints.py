"""Weights between another checkpoint and the model's, or beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import SEARCHED_SHARES, line_search
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """older + s (model - older).

    The difference follows that of the whole step with the slope 1 - s, so that s need not be searched.
    """
    scorer = evidence.scorer
    exact = scorer.model().flat.detach()
    for folder in scorer.checkpoints:
        older = scorer.decoder(folder).flat.detach()
        if not torch.equal(older, exact):
            scale, scores = line_search(evidence, older, exact)
            yield Prediction(
                f"the sampler's weights hold {scale:.2g} of the step from {folder} to the model",
                scores,
                SEARCHED_SHARES,
            )


def half_of_an_update(w: World) -> Log:
    """A part of the last steps is missing."""
    old, share = w.parameters(w.old), w.uniform(0.3, 0.7)
    return w.sampler(w.changed(lambda name, x: old[name] + share * (x - old[name])), options=w.with_old)


FAULT = Predicted(
    name="between two checkpoints",
    order=210,
    predict=predict,
    needs_decoder=True,
    remedy="A part of the update is missing in the sampler, or it averages weights: compare the scale of the "
    "update, or of the adapter, on both sides.",
    tries="weights that hold a part of the step from a model that `--checkpoints` names to the model, or "
    "more than all of it; the share is searched",
    plants=(Plant(group="weights", make=half_of_an_update, named=("between", "scaled update")),),
)
