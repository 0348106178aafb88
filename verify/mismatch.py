"""How far two sets of log-probabilities of the same tokens are apart.

The estimators use tokens that were drawn from the sampler. With d = logp_trainer - logp_sampler and
r = exp(d), over C tokens (Schulman, "Approximating KL divergence", 2020):

    k1 = mean(-d)     k2 = mean(d^2 / 2)     k3 = mean(r - 1 - d)        estimate KL(sampler || trainer)
    chi2 = mean(r^2) - 1        ess = (sum r)^2 / (C sum r^2), the effective sample size as a share of C

All sums are correctly rounded in fp64 (math.fsum), so they do not depend on the order of the tokens.
"""

import math
from collections.abc import Sequence

import numpy as np

_PERCENTILES = {"ratio_p1": 1, "ratio_p50": 50, "ratio_p99": 99}


def _mean(x: np.ndarray) -> float:
    try:
        return math.fsum(x.tolist()) / len(x)
    except (OverflowError, ValueError):  # a sum beyond fp64, or infinities of both signs
        with np.errstate(over="ignore", invalid="ignore"):
            return float(x.mean())


def bits_equal(trainer: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """Which tokens have the same bits, [C]."""
    return trainer.astype(np.float32).view(np.int32) == sampler.astype(np.float32).view(np.int32)


def log_ratios(trainer: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """d of each token, [C] fp64. It is exactly 0 where the bits are equal, also where both are infinite."""
    with np.errstate(invalid="ignore"):
        d = trainer.astype(np.float64) - sampler.astype(np.float64)
    return np.where(bits_equal(trainer, sampler), 0.0, d)


def ratios(d: np.ndarray, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """r = exp(d) of each token, [C], and the product of r over each sequence, [S]."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(d), np.exp(np.add.reduceat(d, np.concatenate([[0], np.cumsum(lengths)[:-1]])))


def spread(r: np.ndarray) -> dict[str, float]:
    """chi2 and ess of the ratios r [n], and the smallest and the largest ratio."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, square = _mean(r), _mean(r * r)
    ess = mean * mean / square if square > 0 else 0.0
    return {"chi2": square - 1.0, "ess": ess, "ratio_min": float(r.min()), "ratio_max": float(r.max())}


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
    metrics = {
        "k1": _mean(-d) + 0.0,  # + 0.0 turns -0.0 into 0.0
        "k2": _mean(d * d / 2),
        "k3": _mean(r - 1 - d),
        "max_abs": float(np.abs(d).max()),
        "frac_equal": float(bits_equal(trainer, sampler).mean()),
        **{name: float(np.percentile(r, q)) for name, q in _PERCENTILES.items()},
        **spread(r),
        "sequence_ratio_min": float(sequence_ratio.min()),
        "sequence_ratio_max": float(sequence_ratio.max()),
    }
    return {prefix + name: value for name, value in metrics.items()}
