"""The mask of the drawn tokens lies one token too early or too late, and their numbers with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import off_by_one
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The numbers of the tokens before, and of those after, in lines whose mask leaves tokens out."""
    yield from off_by_one(evidence, masked=True, words="the mask lies one token too {}")


def a_mask_too_late(w: World) -> Log:
    """Tokens 3 to 5 are of a tool; mask and numbers were padded by one token on the left."""
    lines = []
    for x in w.both(w.drawn()):
        drawn = [i not in (3, 4, 5) for i in range(len(x.sampler))]
        late = [True, *drawn[:-1]]
        numbers = [-0.5, *x.sampler.tolist()[:-1]]
        column = np.float32([n if d else np.nan for n, d in zip(numbers, late, strict=True)])
        lines.append(replace(x, sampler=column, extra={"mask": late}))
    return w.log(lines)


FAULT = Predicted(
    name="mask off by one",
    order=160,
    predict=predict,
    remedy="The logits at token i predict token i + 1: shift labels, mask and log-probabilities alike.",
    tries="the same, where a mask leaves tokens out",
    is_of_whole_log=True,
    plants=(Plant(group="numbers", make=a_mask_too_late),),
)
