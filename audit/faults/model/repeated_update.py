"""The step from another checkpoint to the model's, taken twice or three times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_weights
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """older + 2 (model - older), and three times.

    A merge of an adapter into weights that it was merged into before leaves such weights.
    """
    scorer = evidence.scorer
    exact = scorer.model().flat.detach()
    for folder in scorer.checkpoints:
        step = exact.double() - scorer.decoder(folder).flat.detach().double()
        if not step.any():
            continue
        for times in (2, 3):
            flat = (exact + (times - 1) * step).to(exact.dtype)
            what = f"the update from {folder} to the model is in the sampler's weights {times} times"
            yield Prediction(what, decoder_scores(with_weights(evidence, flat), evidence))


def an_update_merged_twice(w: World) -> Log:
    """Deltas that an engine adds to weights which have them."""
    old = w.parameters(w.old)
    return w.sampler(w.changed(lambda name, x: x + (x - old[name])), options=w.with_old)


FAULT = Predicted(
    name="update applied again",
    order=230,
    predict=predict,
    needs_decoder=True,
    remedy="Merge an adapter into the base weights each time, never into merged ones.",
    tries="the step from a model that `--checkpoints` names to the model, taken twice and three times, as by "
    "an adapter that is merged into merged weights",
    known_from=("verl-project/verl#7904",),
    plants=(Plant(group="weights", make=an_update_merged_twice, named=("update applied again", "between")),),
)
