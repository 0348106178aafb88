"""What a token at the edge of a cut set moves the others by.

Under top-p and min-p a rounding decides whether a token at the edge is kept, and all kept tokens share what
one more or one fewer has. So two sound engines differ by far more than they round, now and then.

Shapes: C completion tokens.
"""

from dataclasses import replace

import numpy as np

from ...kernels.sampling_params import SamplingParams
from .evidence import Evidence
from .scorer import hidden_rows, read_rows

# The probability that 16-bit engines differ by in the sum of a set, and the share by which they differ in a
# token's probability.
_SUM, _SHARE = 0.02, 0.1


def with_slack(evidence: Evidence) -> Evidence:
    """The lines with `slack`: how far the number of a token moves where a cut keeps a little more or less."""
    params = evidence.params()
    if evidence.scorer is None or not any(p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        return evidence
    decoder, pairs = evidence.scorer.model(), evidence.pairs()
    rows = hidden_rows(decoder, pairs)
    as_said, *moved = (read_rows(decoder, rows, pairs, [_cut(p, by) for p in params]) for by in (0, -1, 1))
    lines = []
    for line, scores, *others in zip(evidence.lines, as_said, *moved, strict=True):
        with np.errstate(invalid="ignore"):
            moves = [np.abs(other.astype(np.float64) - scores) for other in others]
        finite = [np.where(np.isfinite(x), x, 0.0) for x in moves]
        lines.append(replace(line, slack=np.max(finite, axis=0)))
    return replace(evidence, lines=lines)


def _cut(p: SamplingParams, by: int) -> SamplingParams:
    """The parameters with a cut that keeps less (by = -1), the same, or more (1)."""
    top_p = min(max(p.top_p + by * _SUM, 1e-6), 1.0) if p.top_p < 1.0 else 1.0
    return p._replace(top_p=top_p, min_p=p.min_p * (1.0 - by * _SHARE))


def beyond_slack(d: np.ndarray, slack: np.ndarray | None) -> np.ndarray:
    """The part of a difference [C] that no edge explains."""
    return d if slack is None else np.sign(d) * np.maximum(np.abs(d) - slack, 0.0)
