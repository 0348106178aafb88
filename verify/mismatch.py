"""How far two sets of log-probabilities of the same tokens are apart. Estimators from tokens drawn from the sampler.

With d = logp_trainer - logp_sampler and r = exp(d), over C tokens (Schulman, "Approximating KL divergence", 2020):

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


def mismatch_metrics(trainer: np.ndarray, sampler: np.ndarray, lengths: Sequence[int], prefix: str = "mismatch/") -> dict[str, float]:
    """All mismatch metrics. trainer, sampler [C] fp32 log-probabilities; lengths: tokens of each sequence, sums to C.

    `frac_equal` compares bits. Raises ValueError when a value is missing (NaN), or the shapes do not fit.
    """
    if trainer.shape != sampler.shape or trainer.shape != (sum(lengths),) or not len(trainer):
        raise ValueError(f"mismatch: trainer {trainer.shape}, sampler {sampler.shape} must be [{sum(lengths)}], the sum of lengths, not 0")
    for name, values in (("trainer", trainer), ("sampler", sampler)):
        if np.isnan(values).any():
            raise ValueError(f"mismatch: the {name} logprob of token {int(np.flatnonzero(np.isnan(values))[0])} is NaN")
    equal = trainer.astype(np.float32).view(np.int32) == sampler.astype(np.float32).view(np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        d = np.where(equal, 0.0, trainer.astype(np.float64) - sampler.astype(np.float64))  # -inf - -inf is 0 here
        r = np.exp(d)
        sums = np.add.reduceat(d, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
        sequence_ratio = np.exp(sums)
        square = _mean(r * r)
    metrics = {
        "k1": _mean(-d) + 0.0,  # + 0.0 turns -0.0 into 0.0
        "k2": _mean(d * d / 2),
        "k3": _mean(r - 1 - d),
        "max_abs": float(np.abs(d).max()),
        "frac_equal": float(equal.mean()),
        "ratio_min": float(r.min()),
        **{name: float(np.percentile(r, q)) for name, q in _PERCENTILES.items()},
        "ratio_max": float(r.max()),
        "ess": _mean(r) * _mean(r) / square if square > 0 else 0.0,
        "chi2": square - 1.0,
        "sequence_ratio_min": float(sequence_ratio.min()),
        "sequence_ratio_max": float(sequence_ratio.max()),
    }
    return {prefix + name: value for name, value in metrics.items()}
