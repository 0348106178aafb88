"""How far two sets of log-probabilities of the same tokens are apart.

The estimators use tokens that were drawn from the sampler. With d = logp_trainer - logp_sampler and
r = exp(d), over C tokens (Schulman, "Approximating KL divergence", 2020):

    k1 = mean(-d)     k2 = mean(d^2 / 2)     k3 = mean(r - 1 - d)        estimate KL(sampler || trainer)
    mean_abs = mean(|d|)        k3_sequence = the same sum as k3 over S sequences, in nats a sequence

    chi2 = mean((r - 1)^2)      ess = (sum r)^2 / (C sum r^2), the effective sample size as a share of C

E[r] = 1 where the tokens were drawn from the sampler's column and the trainer has its whole mass on what the
sampler can draw. chi2 is the variance of r about this mean, and estimates the divergence chi2(trainer ||
sampler). It is never negative.

Two kinds of token have no such figures, and are counted:

    outside    p_trainer = 0 and p_sampler > 0: d = -inf, r = 0. Outside the trainer's top-p or top-k set.
    infinite   p_sampler = 0 and p_trainer > 0, or d > 300: r is infinite, or its square has no place in fp64.

k1, k2, k3, k3_sequence, mean_abs and max_abs are over the rest. The ratios of outside tokens are 0, which is
a number: chi2, ess and the percentiles of r take them. They leave the infinite ones out. KL(sampler ||
trainer) itself is infinite where a token is outside. Where no token is left, a figure is NaN.

All sums are correctly rounded in fp64 (exact_sum), so they do not depend on the order of the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PERCENTILES = {"ratio_p1": 1, "ratio_p50": 50, "ratio_p99": 99}
# A larger log ratio counts as infinite. The sum of the squares of 10^40 such ratios is still a number of
# fp64.
_LARGEST = 300.0
# Numbers of a sum that are cut together, and how often. Fewer numbers are faster by math.fsum alone.
_PART, _CUTS, _FEW = 1 << 14, 4, 1 << 9


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; NaN where it is unknown."""

    value: float
    standard_error: float


def mean(x: np.ndarray) -> float:
    """The mean of x [n] from a correctly rounded sum. NaN where x is empty."""
    if not len(x):
        return math.nan
    return exact_sum(x) / len(x)


def exact_sum(x: np.ndarray) -> float:
    """The correctly rounded sum of x [n]: that of math.fsum, at a tenth of its time where x is long.

    Raises OverflowError and ValueError as math.fsum does.
    """
    if len(x) <= _FEW:
        return math.fsum(x.tolist())
    terms: list[float] = []
    for i in range(0, len(x), _PART):
        _add_terms(terms, x[i : i + _PART].astype(np.float64))
    return math.fsum(terms)


def _add_terms(terms: list[float], part: np.ndarray) -> None:
    """Add to `terms` a few numbers whose exact sum is that of part [n] fp64, which is changed.

    With 2^m >= n + 2 and |x| <= 2^e, high = (x + 2^(m+e)) - 2^(m+e) is a multiple of 2^(m+e-53), and no sum
    of these, in any order, has more than 53 bits. x - high is exact too (Rump, Ogita and Oishi, "Accurate
    floating-point summation", 2008). Each cut takes 53 - m bits.
    """
    m = (len(part) + 1).bit_length()
    for _ in range(_CUTS):
        largest_term = float(np.abs(part).max())
        if not 0.0 < largest_term < 2.0**900:  # nothing is left, or NaN or infinite
            break
        unit = math.ldexp(1.0, m + math.frexp(largest_term)[1])
        high = (part + unit) - unit
        terms.append(float(high.sum()))
        part -= high
    terms += part[part != 0.0].tolist()


def bits_equal(trainer: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """Which tokens have the same bits, [C]."""
    return trainer.astype(np.float32).view(np.int32) == sampler.astype(np.float32).view(np.int32)


def first_unequal_bits(x: np.ndarray, y: np.ndarray) -> int | None:
    """The first index at which the bits of two columns differ, as far as both go. A NaN equals every NaN."""
    n = min(len(x), len(y))
    both_nan = np.isnan(x[:n]) & np.isnan(y[:n])
    places = np.flatnonzero(~(bits_equal(x[:n], y[:n]) | both_nan))
    return int(places[0]) if len(places) else None


def log_ratios(trainer: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """d of each token, [C] fp64. It is exactly 0 where the bits are equal, also where both are infinite."""
    with np.errstate(invalid="ignore"):
        d = trainer.astype(np.float64) - sampler.astype(np.float64)
    return np.where(bits_equal(trainer, sampler), 0.0, d)


def outside(d: np.ndarray) -> np.ndarray:
    """Which tokens have probability 0 for the trainer alone, [C]."""
    return np.isneginf(d)


def infinite(d: np.ndarray) -> np.ndarray:
    """Which tokens have an infinite ratio, or one too large for fp64, [C]."""
    return d > _LARGEST


def rest(d: np.ndarray) -> np.ndarray:
    """d of the tokens that are neither outside nor infinite, [<= C]."""
    return d[~(outside(d) | infinite(d))]


def ratios(d: np.ndarray, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """r = exp(d) of each token, [<= C], and the product of r over each sequence, [<= S].

    Infinite ratios are left out.
    """
    with np.errstate(invalid="ignore"):  # -inf and inf in one sequence add up to NaN
        sums = np.add.reduceat(d, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    return np.exp(d[d <= _LARGEST]), np.exp(sums[sums <= _LARGEST])


def spread(r: np.ndarray) -> dict[str, float]:
    """chi2 and ess of the ratios r [n], and the smallest and the largest ratio. NaN where r is empty."""
    first, square = mean(r), mean(r * r)
    ess = 0.0 if square == 0.0 else first * first / square
    low, high = (float(r.min()), float(r.max())) if len(r) else (math.nan, math.nan)
    return {"chi2": mean((r - 1.0) ** 2), "ess": ess, "ratio_min": low, "ratio_max": high}


def standard_error(x: np.ndarray, lengths: Sequence[int]) -> float:
    """The standard error of the mean of x [C], whose sequences are the clusters; NaN for fewer than 2 tokens.

    lengths: the number of tokens of each of S sequences; they add up to C. Tokens of a sequence may depend on
    each other in any way, sequences may not (Liang and Zeger, "Longitudinal data analysis using generalized
    linear models", 1986, for a mean):

        sqrt(S / (S - 1) sum_s (sum_{i in s} (x_i - mean))^2) / C

    Few clusters make this estimate too small now and then, so it is never below the error of independent
    tokens. That one alone is taken for one sequence.
    """
    count, lengths = len(x), [n for n in lengths if n]
    if count < 2:
        return math.nan
    centred = x - mean(x)
    independent = math.sqrt(exact_sum(centred * centred) / (count - 1) / count)
    if len(lengths) < 2:
        return independent
    sums = np.add.reduceat(centred, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    clusters = len(lengths)
    clustered = math.sqrt(exact_sum(sums * sums) * clusters / (clusters - 1)) / count
    return max(independent, clustered)


def percentile(x: np.ndarray, q: float) -> float:
    """The q-th percentile of x [n]; NaN where x is empty."""
    return float(np.percentile(x, q)) if len(x) else math.nan


def largest(x: np.ndarray) -> float:
    """The largest of x [n]; NaN where x is empty."""
    return float(x.max()) if len(x) else math.nan


def mismatch_metrics(
    trainer: np.ndarray, sampler: np.ndarray, lengths: Sequence[int], prefix: str = "mismatch/"
) -> dict[str, float]:
    """All mismatch metrics. `frac_equal` compares bits.

    trainer, sampler: log-probabilities [C] in fp32. lengths: the number of tokens of each sequence; they add
    up to C. Raises ValueError when a value is missing (NaN), or when the shapes do not fit.
    """
    if trainer.shape != sampler.shape or trainer.shape != (sum(lengths),) or not len(trainer):
        raise ValueError(
            f"mismatch: trainer {trainer.shape}, sampler {sampler.shape} must be [{sum(lengths)}], "
            "the sum of lengths, not 0"
        )
    for name, values in (("trainer", trainer), ("sampler", sampler)):
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            raise ValueError(f"mismatch: the {name} logprob of token {int(missing[0])} is NaN")
    d = log_ratios(trainer, sampler)
    r, sequence_ratio = ratios(d, lengths)
    known = rest(d)
    metrics = {
        "k1": mean(-known) + 0.0,  # + 0.0 turns -0.0 into 0.0
        "k2": mean(known * known / 2),
        "k3": mean(np.exp(known) - 1 - known),
        "k3_sequence": exact_sum(np.exp(known) - 1 - known) / len(lengths),
        "mean_abs": mean(np.abs(known)),
        "max_abs": largest(np.abs(known)),
        "frac_equal": float(bits_equal(trainer, sampler).mean()),
        "frac_outside": float(outside(d).mean()),
        "frac_infinite": float(infinite(d).mean()),
        **{name: percentile(r, q) for name, q in _PERCENTILES.items()},
        **spread(r),
        "sequence_ratio_min": -largest(-sequence_ratio),
        "sequence_ratio_max": largest(sequence_ratio),
    }
    return {prefix + name: value for name, value in metrics.items()}
