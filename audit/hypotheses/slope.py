"""How a difference follows a predicted one.

slope = sum e r / sum e^2,  its error from what is left,   both over w: e predicted, r found, w of noise.py
"""

import math
from collections.abc import Sequence

import numpy as np

from .judgement import SLOPE_MOST
from .noise import weight


def slope(
    effects: Sequence[np.ndarray], differences: Sequence[np.ndarray], logp: Sequence[np.ndarray]
) -> tuple[float, float]:
    """The slope, and how many of its errors it is away from 0. All [C] of each line.

    What is not finite is passed over.
    """
    if not effects:
        return 0.0, 0.0
    e, r, w = np.concatenate(effects), np.concatenate(differences), weight(np.concatenate(logp))
    known = np.isfinite(e) & np.isfinite(r)
    e, r = e[known] / w[known], r[known] / w[known]
    moved = np.abs(e[e != 0.0])
    if not len(moved):
        return 0.0, 0.0
    size = float(moved.mean())
    kept = np.abs(e) <= SLOPE_MOST * size
    e, r = e[kept], r[kept]
    square = float((e * e).sum())
    if not square:
        return 0.0, 0.0
    angle = float((e * r).sum()) / square
    error = float(np.sqrt(((r - angle * e) ** 2).sum() / max(len(e) - 1, 1))) / math.sqrt(square)
    return angle, abs(angle) / error if error else math.inf
