"""Tokens that the model did not draw, with the number 0 in place of a log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import logged_numbers, mapped
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """0 wherever the sampler's number is 0. A trainer scores all tokens alike."""
    if evidence.side == "trainer" or not (logged_numbers(evidence) == 0.0).any():
        return
    if not any((line.logged[:-1] == 0.0).any() for line in evidence.lines):
        return  # the last token of a line was drawn
    what = "tokens that the model did not draw are logged with 0"
    yield Prediction(what, mapped(evidence, lambda line: np.where(line.logged == 0.0, 0.0, line.scored)))


def answers_of_a_tool(w: World) -> Log:
    """Eight tokens in the middle of each completion are a tool's, and count as certain."""
    lines = []
    for x in w.drawn():
        if len(x.completion) < 24:
            lines.append(x)
            continue
        ids, numbers = list(x.completion), x.sampler.copy()
        ids[8:16], numbers[8:16] = w.words(8), 0.0
        lines.append(replace(x, completion=ids, sampler=numbers))
    lines = w.both(lines)
    # What follows was drawn after other ids, so both sides score it anew.
    scored = w.scored(w.bf16, lines)
    return w.log(
        [
            replace(x, sampler=np.where(x.sampler == 0.0, x.sampler, y))
            for x, y in zip(lines, scored, strict=True)
        ]
    )


FAULT = Predicted(
    name="zeros for tokens not drawn",
    order=180,
    predict=predict,
    remedy="Mask these tokens out of the loss, and log null for them.",
    tries="0 wherever the sampler's number is 0",
    known_from=("modelscope/ms-swift#10106",),
    is_of_whole_log=True,
    plants=(Plant(group="numbers", make=answers_of_a_tool),),
)
