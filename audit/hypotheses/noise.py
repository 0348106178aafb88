"""What rounding makes of a log-probability, and whether a difference is rounding and nothing else.

    |d| ~ size w,   w = 1 - p + 0.02        d = logged - scored in nats, of a token of probability p

A rounding moves the logits. log_softmax hands 1 - p of that to a token, so likely tokens move little.
`size` is measured on the model for each dtype, beside fp32. Two sides that round independently have the
root of the sum of squares. Without a model it is the log's own, and the dtype is the narrowest whose band
holds it.

A difference is rounding if it is no larger than `size` says, on average and in its tail, has no sign, and
is no larger in one line than in another. Each of these bounds alone lets a fault pass: a temperature has a
sign, a wrong number has a tail, another checkpoint in one group has lines.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .judgement import (
    BANDS,
    BIAS,
    BIAS_ERRORS,
    FP32,
    LEAST_WEIGHT,
    LINE,
    LINE_TOKENS,
    TAIL,
    TAIL_TIMES,
    TIMES,
)


class Noise(NamedTuple):
    """The rounding of a pair of dtypes."""

    dtype: str  # of the side that rounds more
    size: float  # nats of a token, over w
    tail: float = TAIL  # the largest over the mean


def weight(logp: np.ndarray) -> np.ndarray:
    """w of log-probabilities."""
    return 1.0 - np.exp(np.minimum(logp.astype(np.float64), 0.0)) + LEAST_WEIGHT


def measured(dtype: str, rounded: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> Noise:
    """The noise of a dtype from the same tokens in it and in fp32, [C] for each line."""
    r, e = np.concatenate(rounded), np.concatenate(exact)
    known = np.isfinite(r) & np.isfinite(e)
    if not known.any():
        return Noise(dtype, FP32)
    z = np.abs(r[known].astype(np.float64) - e[known]) / weight(e[known])
    size = max(float(z.mean()), FP32)
    return Noise(dtype, size, max(TAIL, float(z.max()) / size))


def pairs(trainer: str, by_dtype: Mapping[str, Noise]) -> list[Noise]:
    """The noise beside a trainer of a dtype, of a sampler of each dtype, the least first."""
    beside = by_dtype[trainer]
    both = [
        Noise(
            max(beside, noise, key=_size).dtype,
            math.hypot(noise.size, beside.size),
            max(noise.tail, beside.tail),
        )
        for noise in by_dtype.values()
    ]
    return sorted(both, key=_size)


def _size(noise: Noise) -> float:
    return noise.size


def band(d: Sequence[np.ndarray], logp: Sequence[np.ndarray]) -> list[Noise]:
    """The noise of a log's own size, where a dtype's band holds it. d, logp: [C] of each line.

    Two sides that compute alike share most of their roundings. So the mean is small, and a few tokens differ
    by a whole rounding: the longer tail is that of the dtype whose band holds the largest of them. Tokens
    within the usual tail must round to 16 bits as well: few tokens beside equal ones are no rounding.
    """
    z = np.concatenate([np.empty(0), *(np.abs(x) / weight(y) for x, y in zip(d, logp, strict=True))])
    known = z[np.isfinite(z)]
    size, largest = (float(known.mean()), float(known.max())) if len(known) else (0.0, 0.0)
    size, usual = max(size, FP32), TAIL_TIMES * TAIL * size
    is_shared = largest > usual and known[known <= usual].mean() > BANDS["float32"]
    if is_shared and (dtype := _narrowest(largest)):
        return [Noise(dtype, size, largest / size)]
    dtype = _narrowest(size)
    return [Noise(dtype, size)] if dtype else []


def _narrowest(size: float) -> str | None:
    """The narrowest dtype whose band holds a size; None where none does."""
    return next((name for name, most in BANDS.items() if size <= most), None)


def beyond_slack(d: np.ndarray, slack: np.ndarray | None) -> np.ndarray:
    """The part of a difference [C] that no edge of a cut and no declared decimals explain (Line.slack)."""
    return d if slack is None else np.sign(d) * np.maximum(np.abs(d) - slack, 0.0)


def is_rounding(
    noise: Noise, d: Sequence[np.ndarray], logp: Sequence[np.ndarray], signed: bool = True
) -> bool:
    """Whether a difference is rounding of this size. d, logp: [C] of each line; NaN is passed over.

    signed: whether a mean beyond chance speaks against it.
    """
    lines = [x / (weight(y) * noise.size) for x, y in zip(d, logp, strict=True)]
    lines = [z[~np.isnan(z)] for z in lines]
    lines = [z for z in lines if len(z)]
    z = np.concatenate(lines)
    mean = float(np.abs(z).mean())
    spread = float(z.std())
    error = spread / math.sqrt(len(z))
    has_sign = abs(float(z.mean())) > BIAS * mean + BIAS_ERRORS * error
    return bool(
        mean <= TIMES
        and np.abs(z).max() <= TAIL_TIMES * max(noise.tail, TAIL)
        and not (signed and has_sign)
        and all(
            # A line of few tokens has the mean of its largest one.
            np.abs(x).mean() <= max(LINE * max(mean, 1.0), mean + BIAS_ERRORS * spread / math.sqrt(len(x)))
            for x in lines
            if len(x) >= LINE_TOKENS
        )
    )
