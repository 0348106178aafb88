"""Log-probabilities that were rounded when they were written: to few decimals, or to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.column_numbers import logged_numbers, mapped
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World

# Decimals that a log may keep.
_DECIMALS = range(1, 7)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Numbers of few digits. Only where every logged number has no more, and the log does not say so."""
    values = logged_numbers(evidence)
    declared = [line.decimals for line in evidence.lines]
    decimals = next((n for n in _DECIMALS if _has_no_more(values, n)), None)
    if decimals is not None and (None in declared or decimals < max(declared)):
        what = f"the logged numbers are rounded to {decimals} decimals"
        yield Prediction(
            what, mapped(evidence, lambda line: np.round(line.scored.astype(np.float64), decimals))
        )
    for name, rounding in (("bfloat16", through_bfloat16), ("float16", through_float16)):
        if np.array_equal(rounding(values.astype(np.float32)), values.astype(np.float32)):
            what = f"the logged numbers are rounded to {name}"
            yield Prediction(what, mapped(evidence, lambda line, r=rounding: r(line.scored)))


def _has_no_more(values: np.ndarray, decimals: int) -> bool:
    """Whether numbers have so many decimals at most. fp32 stores a decimal number to half an ulp."""
    return bool(
        (np.abs(np.round(values, decimals) - values) <= np.spacing(np.abs(values).astype(np.float32))).all()
    )


def through_bfloat16(x: np.ndarray) -> np.ndarray:
    """x fp32, rounded to bf16: to the nearest, ties to the even one. NumPy has no such type."""
    bits = x.astype(np.float32).view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + to_even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def through_float16(x: np.ndarray) -> np.ndarray:
    """x fp32, rounded to fp16."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def one_decimal(w: World) -> Log:
    """Numbers that a printf has cut to one decimal."""
    return w.renumbered(lambda line: [float(f"{x:.1f}") for x in line.sampler.tolist()])


FAULT = Predicted(
    name="rounded log-probabilities",
    order=10,
    predict=predict,
    remedy="Log all 9 digits of an fp32 number, or say in the log how many decimals it keeps (decimals).",
    tries="1 to 6 decimals, bf16, fp16",
    is_second=True,
    is_of_whole_log=True,
    plants=(Plant(group="numbers", make=one_decimal),),
)
