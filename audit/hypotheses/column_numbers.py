"""What faults of the numbers themselves have in common. No model is needed: the trainer's column is enough.

Shapes: C completion tokens.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .evidence import Evidence
from .judgement import MOST
from .prediction import Prediction
from .scorable_lines import Line, Scores


def mapped(evidence: Evidence, change: Callable[[Line], np.ndarray]) -> Scores:
    """What the lines would hold, line by line."""
    return {i: change(line).astype(np.float32) for i, line in enumerate(evidence.lines)}


def logged_numbers(evidence: Evidence) -> np.ndarray:
    """All logged numbers of the lines, fp64."""
    values = np.concatenate([line.logged for line in evidence.lines]).astype(np.float64)
    return values[np.isfinite(values)]


def off_by_one(evidence: Evidence, masked: bool, words: str) -> Iterator[Prediction]:
    """The numbers of the tokens before and after, in the lines that are masked, or in the others."""
    for by, direction in ((1, "late"), (-1, "early")):
        scores = {
            i: moved(line.scored, by)
            for i, line in enumerate(evidence.lines)
            if line.masked == masked and len(line.scored) > 2
        }
        yield Prediction(words.format(direction), scores)


def moved(x: np.ndarray, by: int) -> np.ndarray:
    """x[i - by] at i; NaN where there is none."""
    result = np.full_like(x, np.nan)
    if by >= len(x) or -by >= len(x):
        return result
    if by > 0:
        result[by:] = x[:-by]
    else:
        result[:by] = x[-by:]
    return result


def closest(line: Line, candidates: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The candidate [C] of `candidates` [n, C] that is nearest to the logged numbers of a line."""
    candidates = np.asarray(candidates)
    with np.errstate(invalid="ignore"):  # both may be at -inf
        distances = np.nansum(np.minimum(np.abs(candidates - line.logged), MOST), axis=1)
    return candidates[int(np.argmin(distances))]
