"""Logarithms to another base than e."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import mapped
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World

_BASES = {"2": math.log(2.0), "10": math.log(10.0)}


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """All numbers of a side are to the base 2, or 10."""
    for base, factor in _BASES.items():
        what = f"the logged numbers are logarithms to the base {base}, not natural ones"
        scores = mapped(evidence, lambda line, f=factor: line.scored / f)
        yield Prediction(what, scores, undone=lambda x, f=factor: (x * f).astype(np.float32))


def all_base_ten(w: World) -> Log:
    """A server whose JSON has log10 of the probabilities."""
    return w.renumbered(lambda line: [math.log10(math.exp(x)) for x in line.sampler.tolist()])


def penalty_and_base_ten(w: World) -> Log:
    """A sampler with a penalty, whose server writes log10."""
    lines = w.drawn(replace(w.usual, repetition=w.uniform(1.1, 1.2)))
    lines = [replace(x, sampler=np.float32(x.sampler / np.log(10.0))) for x in lines]
    return w.log(w.both(lines))


FAULT = Predicted(
    name="logarithms to another base",
    order=130,
    predict=predict,
    remedy="Log natural logarithms.",
    tries="2 and 10",
    is_of_whole_log=True,
    plants=(
        Plant(group="numbers", make=all_base_ten),
        Plant(group="composed", make=penalty_and_base_ten, named=("repetition", "penalties", "base")),
    ),
)
