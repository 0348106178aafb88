"""The sampler computed with the weights of another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The other checkpoints that were named, one by one."""
    scorer = evidence.scorer
    for folder in scorer.checkpoints:
        decoder = scorer.decoder(folder)
        scores = decoder_scores(decoder, evidence)
        yield Prediction(f"the sampler computed with the weights of {folder}", scores, decoder=decoder)


def stale_weights(w: World) -> Log:
    """A sync that came late."""
    return w.sampler(w.model(w.old), options=w.with_old)


def trainer_with_old_weights(w: World) -> Log:
    """A trainer's column that an earlier step left."""
    return w.log(w.both(w.drawn(), model=w.model(w.old, w.exact)), options=w.with_old)


def old_weights_in_a_group(w: World) -> Log:
    """A sync in the middle of a batch: two prompts were drawn before it."""
    old = w.draw(w.model(w.old), w.prompts[2:4], 3, w.usual, w.seed + 9)
    lines = w.drawn()
    return w.log(w.both([*lines[:6], *old, *lines[12:]]), options=w.with_old)


def stale_and_top_p(w: World) -> Log:
    """A late sync, and a top-p that the log does not say."""
    drawn = replace(w.usual, top_p=w.uniform(0.85, 0.95))
    return w.sampler(w.model(w.old), drawn, options=w.with_old)


FAULT = Predicted(
    name="another checkpoint",
    order=190,
    predict=predict,
    remedy="The sync did not reach the sampler, or came late: compare weight versions before each draw.",
    tries="each model that `--checkpoints` names",
    known_from=("huggingface/trl#5312",),
    is_second=True,
    perturb=("delay",),
    plants=(
        Plant(
            group="column",
            make=trainer_with_old_weights,
            named=("trainer column, another checkpoint", "trainer column, incomplete sync"),
        ),
        Plant(group="place", make=old_weights_in_a_group),
        Plant(group="weights", make=stale_weights),
        Plant(group="composed", make=stale_and_top_p, named=("another checkpoint", "drew with top-p")),
    ),
)
