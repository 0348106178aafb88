"""The held-out accuracy among the metrics of a run: its two names, and its curve."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Of the weights after a step; of the weights that the run began with, in the line of step 0.
ACCURACY, BASE_ACCURACY = "eval/accuracy", "eval/base_accuracy"


def held_out_curve(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(steps done, held-out accuracy) of every evaluation; 0 steps are the model that the run began with.

    lines: the metrics of the steps, in their order. A value that is None or not finite is left out.
    """
    points = []
    for line in lines:
        before, after = line.get(BASE_ACCURACY), line.get(ACCURACY)
        points += [(line["step"], before), (line["step"] + 1, after)]
    return [(done, x) for done, x in points if x is not None and math.isfinite(x)]
