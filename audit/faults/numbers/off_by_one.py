"""Each number stands one token too early or too late, in lines without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.column_numbers import off_by_one
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The numbers of the tokens before, and of those after."""
    yield from off_by_one(evidence, masked=False, words="each logged number stands one token too {}")


def a_token_too_late(w: World) -> Log:
    """A sampler whose list of numbers begins with one that the prompt has left."""
    return w.renumbered(lambda line: [-0.5, *line.sampler.tolist()[:-1]])


FAULT = Predicted(
    name="off by one",
    order=150,
    predict=predict,
    remedy="The logits at token i predict token i + 1: shift labels, mask and log-probabilities alike.",
    tries="the numbers of the token before, or after",
    is_of_whole_log=True,
    plants=(Plant(group="numbers", make=a_token_too_late),),
)
