"""The prompt of another line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_prompts import nearest_pairs
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Of the lines farthest apart, the nearest prompts in the log first."""
    yield from nearest_pairs(
        evidence,
        "the completions were drawn for the prompts of other lines",
        lambda line, other: (other.prompt_ids, line.completion_ids),
    )


def prompts_of_the_next_group(w: World) -> Log:
    """The answers of a batch came back in another order than its prompts."""
    lines = w.drawn()
    moved = [*lines[3:], *lines[:3]]
    return w.log(w.both([replace(x, prompt=y.prompt) for x, y in zip(lines, moved, strict=True)]))


FAULT = Predicted(
    name="another line's prompt",
    order=380,
    predict=predict,
    remedy="Carry prompt, completion and log-probabilities in one record from the sampler to the trainer.",
    tries="the other lines of the log",
    known_from=("allenai/open-instruct#1473",),
    is_of_whole_log=True,
    is_late=True,
    plants=(Plant(group="lines", make=prompts_of_the_next_group),),
)
