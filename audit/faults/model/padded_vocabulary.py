"""Columns of a padded vocabulary in the log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import one_of
from ...hypotheses.prediction import Prediction
from ...hypotheses.scorable_lines import Line
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Widths to which engines pad a vocabulary, as further columns of logit 0.
_PADDED = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The usual widths."""
    n, scores, tried = one_of(evidence.scorer.rows(evidence), _PADDED, _padded, None)
    yield Prediction(f"the sampler's log-sum-exp runs over {n} columns of a padded vocabulary", scores, tried)


def _padded(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    return torch.cat([z, z.new_zeros(len(z), int(x))], 1)


def trainer_pads_the_vocabulary(w: World) -> Log:
    """A trainer that sums over its padded columns."""
    padded = replace(w.usual, padded=int(w.rng.choice([64, 128, 256])))
    return w.log(w.both(w.drawn(), padded))


FAULT = Predicted(
    name="padded vocabulary",
    order=110,
    predict=predict,
    remedy="Cut the logits to the tokenizer's vocabulary before the log-sum-exp.",
    tries="8 to 4,096 columns of logit 0 in the log-sum-exp",
    plants=(Plant(group="place", make=trainer_pads_the_vocabulary),),
)
