"""The figures of an audit: a sampler's and a trainer's log-probabilities of the same tokens.

    d = logp_trainer - logp_sampler     of a token
    r = exp(d)

verify/mismatch.py defines k1, k2, k3, chi2 and ess.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....verify.mismatch import log_ratios, mismatch_metrics, ratios, spread

_PERCENTILES = (50, 90, 99, 99.9)
_WORST = 10


def measure(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> dict[str, Any]:
    """All figures of the report.

    trainer, sampler: logprobs [C] fp32 of each sequence. Raises ValueError for NaN, and for lengths that
    differ.
    """
    t, s = np.concatenate(trainer), np.concatenate(sampler)
    lengths = [len(x) for x in sampler]
    metrics = mismatch_metrics(t, s, lengths, prefix="")
    d = log_ratios(t, s)
    r, sequence_ratio = ratios(d, lengths)
    return {
        "tokens": len(d),
        "sequences": len(lengths),
        "frac_equal": metrics["frac_equal"],
        "max_abs": metrics["max_abs"],
        "abs_percentiles": {str(q): float(np.percentile(np.abs(d), q)) for q in _PERCENTILES},
        **{
            name: {"value": metrics[name], "standard_error": _standard_error(x)}
            for name, x in _estimators(d, r).items()
        },
        "perplexity_sampler": _exp(-s.astype(np.float64).mean()),
        "perplexity_trainer": _exp(-t.astype(np.float64).mean()),
        "token": spread(r),
        "sequence": spread(sequence_ratio),
        "by_position": _by_position(d, lengths),
        "ratio_histogram": _histogram(d),
    }


def worst_tokens(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The tokens whose log-probabilities differ most: sequence, position and both values."""
    d = np.abs(log_ratios(np.concatenate(trainer), np.concatenate(sampler)))
    ends = np.cumsum([len(x) for x in sampler])
    worst = []
    for index in np.argsort(-d, kind="stable")[:_WORST]:
        i = int(np.searchsorted(ends, index, side="right"))
        position = int(index - (ends[i - 1] if i else 0))
        if d[index] > 0:
            worst.append(
                {
                    "sequence": i,
                    "position": position,
                    "trainer": float(trainer[i][position]),
                    "sampler": float(sampler[i][position]),
                }
            )
    return worst


def _estimators(d: np.ndarray, r: np.ndarray) -> dict[str, np.ndarray]:
    return {"k1": -d, "k2": d * d / 2, "k3": r - 1 - d}


def _standard_error(x: np.ndarray) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _by_position(d: np.ndarray, lengths: Sequence[int]) -> list[dict[str, float]]:
    """Mean and maximum of |d| by position in the completion, in buckets that double: 0, 1, 2-3, 4-7, ..."""
    position = np.concatenate([np.arange(n) for n in lengths])
    bucket = np.where(position == 0, 0, np.floor(np.log2(np.maximum(position, 1))).astype(int) + 1)
    rows = []
    for b in np.unique(bucket):
        distances = np.abs(d[bucket == b])
        first = 0 if b == 0 else 1 << (int(b) - 1)
        rows.append(
            {
                "from": first,
                "to": 0 if b == 0 else 2 * first - 1,
                "tokens": len(distances),
                "mean_abs": float(distances.mean()),
                "max_abs": float(distances.max()),
            }
        )
    return rows


def _histogram(d: np.ndarray) -> dict[str, list[float]]:
    """The histogram of the ratio r, with buckets of equal width in d."""
    edge = max(float(np.abs(d[np.isfinite(d)]).max(initial=0.0)), 1e-12)
    counts, edges = np.histogram(np.clip(d, -edge, edge), bins=41, range=(-edge, edge))
    return {
        "ratio_edges": np.exp(edges).tolist(),
        "log_ratio_edges": edges.tolist(),
        "tokens": counts.tolist(),
    }
