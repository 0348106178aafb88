"""What stands in a column of log-probabilities and is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_constant_for_a_missing_number(w: World) -> Log:
    """An engine that writes -9999 where it has no number."""
    lines = w.both(w.drawn())
    numbers = [x.sampler.copy() for x in lines]
    for x in numbers[::3]:
        x[0] = np.float32(-9999.0)
    return w.log([x.with_numbers(y) for x, y in zip(lines, numbers, strict=True)])


FAULT = Checked(
    name="{kinds} in {column} column",
    order=10,
    remedy="Find what writes them. A forward that overflows gives NaN and infinities; padding, or a "
    "request that failed, leaves null or a constant. Mask a token that nobody drew, and train on no "
    "other one without a log-probability.",
    tries="NaN, null, infinities, numbers above 0, and constants such as -9999, beside a drawn token",
    plants=(Plant(group="numbers", make=a_constant_for_a_missing_number, named=("-9999 in",)),),
)
