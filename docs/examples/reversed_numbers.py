"""The numbers of a completion in reverse order: a batch was flipped to pad it, and not flipped back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.column_numbers import mapped
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """What the log would hold: the trainer's numbers, the last one first."""
    what = "the numbers of each completion stand in reverse order"
    yield Prediction(what, mapped(evidence, lambda line: line.scored[::-1]))


def flipped_to_pad(w: World) -> Log:
    """The same log by another route: a list of Python's, popped from its end."""

    def popped(numbers: list[float]) -> list[float]:
        return [numbers.pop() for _ in range(len(numbers))]

    return w.renumbered(lambda line: popped(line.sampler.tolist()))


FAULT = Predicted(
    name="reversed numbers",
    order=165,
    predict=predict,
    remedy="Flip the numbers back with the ids, or do not flip.",
    tries="the completion's numbers, the last one first",
    is_of_whole_log=True,
    plants=(Plant(group="numbers", make=flipped_to_pad),),
)
