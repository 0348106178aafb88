"""The mean of a completion, written at each of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import mapped
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """One number for a whole completion, written at each token."""
    what = "each token has the mean of its completion"
    yield Prediction(what, mapped(evidence, lambda line: np.full_like(line.scored, np.nanmean(line.scored))))


def means_everywhere(w: World) -> Log:
    """A sampler that keeps one number for a completion."""
    return w.renumbered(lambda line: [fmean(line.sampler.tolist())] * len(line.sampler))


def means_in_one_version(w: World) -> Log:
    """From one weight version on, each token has the mean of its completion."""
    lines = [replace(x, extra={"weight_version": 4 + i // 9}) for i, x in enumerate(w.both(w.drawn()))]
    wrong = [
        replace(x, sampler=np.full_like(x.sampler, x.sampler.mean())) if i // 9 else x
        for i, x in enumerate(lines)
    ]
    return w.log(wrong, with_model=False)


FAULT = Predicted(
    name="means in place of tokens",
    order=140,
    predict=predict,
    remedy="Log one number for each token.",
    tries="the mean of each completion at all of its tokens",
    is_of_whole_log=True,
    plants=(
        Plant(group="numbers", make=means_everywhere),
        Plant(group="lines", make=means_in_one_version, named=("mean",)),
    ),
)
