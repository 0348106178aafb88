"""The completion of another line of the same length, with the numbers of this one."""

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
    """Of the lines farthest apart, the nearest completions in the log first."""
    yield from nearest_pairs(
        evidence,
        "the logged numbers belong to the completions of other lines, drawn for this line's prompt",
        lambda line, other: (
            (line.prompt_ids, other.completion_ids)
            if len(line.completion_ids) == len(other.completion_ids)
            else None
        ),
    )


def ids_of_another_prompts_answer(w: World) -> Log:
    """Ids of one array and numbers of another, whose rows a shuffle has parted. All are cut to one length."""
    lines = [x for x in w.drawn() if len(x.completion) >= 16]
    cut = [replace(x, completion=x.completion[:16], sampler=x.sampler[:16]) for x in lines]
    # The numbers are of the completion of another prompt, after this line's.
    read = [replace(x, completion=y.completion) for x, y in zip(cut, [*cut[4:], *cut[:4]], strict=True)]
    numbers = w.scored(w.bf16, read)
    return w.log(w.both([replace(x, sampler=n) for x, n in zip(cut, numbers, strict=True)]))


FAULT = Predicted(
    name="another line's completion",
    order=390,
    predict=predict,
    remedy="Carry prompt, completion and log-probabilities in one record from the sampler to the trainer.",
    tries="the other lines of the log",
    is_of_whole_log=True,
    is_late=True,
    plants=(
        Plant(
            group="lines",
            make=ids_of_another_prompts_answer,
            # Where a model reads its prompt little, the two are nearly the same numbers.
            named=("another line's completion", "another line's numbers"),
        ),
    ),
)
