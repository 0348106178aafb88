"""The figures of an audit: a sampler's and a trainer's log-probabilities of the same tokens.

    d = logp_trainer - logp_sampler     of a token
    r = exp(d)

verify/mismatch.py defines k1, k2, k3, chi2, ess and the standard errors, and which tokens have no such
figures: tokens outside the trainer's top-p or top-k set (d = -inf), and tokens with an infinite ratio. The
estimators are over the rest. The mean ratio takes tokens outside, whose ratio is 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...verify.mismatch import (
    Estimate,
    infinite,
    largest,
    log_ratios,
    mean,
    mismatch_metrics,
    outside,
    percentile,
    ratios,
    rest,
    spread,
    standard_error,
)

_PERCENTILES = (50, 90, 99, 99.9)
# Tokens that must lie beyond a percentile. With fewer it is little more than the largest value.
_BEYOND_PERCENTILE = 5
_WORST = 10
# Shares of its capital that a bet on r > 1 stakes (see evidence).
_STAKES = (0.05, 0.3, 1.0)


@dataclass(frozen=True)
class MeanRatio(Estimate):
    """The mean ratio, and the nats of evidence that the tokens were not drawn from the sampler's column."""

    evidence: float


@dataclass(frozen=True)
class LeftOut:
    """Tokens that the estimators leave out."""

    tokens: int
    share: float
    mean_probability: float | None  # that the sampler gave them; None where there are none


@dataclass(frozen=True)
class Spread:
    """The spread of the ratios of tokens, or of sequences (verify/mismatch.py)."""

    chi2: float
    ess: float
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True)
class Bucket:
    """The difference at some positions in the completion, which count from 0."""

    first: int = field(metadata={"json": "from"})
    last: int = field(metadata={"json": "to"})
    tokens: int
    left_out: int
    mean_abs: float
    max_abs: float


@dataclass(frozen=True)
class Histogram:
    """The histogram of the ratio r, with buckets of equal width in d."""

    ratio_edges: list[float]
    log_ratio_edges: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class WorstToken:
    """One of the tokens whose log-probabilities differ most, its text, and the end of the text before it."""

    sequence: int
    position: int
    trainer: float
    sampler: float
    token: int = -1
    text: str = ""
    before: str = ""


@dataclass(frozen=True)
class Figures:
    """The figures over all tokens of an audit."""

    mean_ratio: MeanRatio
    tokens: int
    sequences: int
    frac_equal: float
    max_abs: float
    outside: LeftOut
    infinite: LeftOut
    abs_percentiles: dict[str, float]
    k1: Estimate
    k2: Estimate
    k3: Estimate
    perplexity_sampler: float
    perplexity_trainer: float
    token: Spread
    sequence: Spread
    by_position: list[Bucket]
    ratio_histogram: Histogram

    @property
    def equal(self) -> bool:
        """Whether every log-probability has the same bits on both sides."""
        return self.frac_equal == 1.0

    @property
    def known(self) -> int:
        """Tokens whose ratio is neither 0 nor infinite: the estimators are over them."""
        return self.tokens - self.outside.tokens - self.infinite.tokens


def measure(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> Figures:
    """All figures of the report.

    trainer, sampler: logprobs [C] fp32 of each sequence. Raises ValueError for NaN, and for lengths that
    differ.
    """
    t, s = np.concatenate(trainer), np.concatenate(sampler)
    lengths = [len(x) for x in sampler]
    metrics = mismatch_metrics(t, s, lengths, prefix="")
    d = log_ratios(t, s)
    r, sequence_ratio = ratios(d, lengths)
    places = ~(outside(d) | infinite(d))
    known, known_lengths = d[places], kept_lengths(places, lengths)
    return Figures(
        mean_ratio=mean_ratio(d, lengths),
        tokens=len(d),
        sequences=len(lengths),
        frac_equal=metrics["frac_equal"],
        max_abs=metrics["max_abs"],
        outside=_counted(outside(d), np.exp(s.astype(np.float64))),
        infinite=_counted(infinite(d), np.exp(s.astype(np.float64))),
        abs_percentiles={
            str(q): percentile(np.abs(known), q)
            for q in _PERCENTILES
            if len(known) * (1 - q / 100) >= _BEYOND_PERCENTILE
        },
        **{
            name: Estimate(metrics[name], standard_error(x, known_lengths))
            for name, x in _estimators(known).items()
        },
        perplexity_sampler=_exp(-mean(_finite(s))),
        perplexity_trainer=_exp(-mean(_finite(t))),
        token=Spread(**spread(r)),
        sequence=Spread(**spread(sequence_ratio)),
        by_position=_by_position(d, lengths),
        ratio_histogram=_histogram(known),
    )


def _counted(which: np.ndarray, probability: np.ndarray) -> LeftOut:
    """Count and share of some tokens, and the mean probability that the sampler gave them.

    The share estimates the mass that the sampler draws there: the tokens were drawn from it.
    """
    return LeftOut(int(which.sum()), float(which.mean()), mean(probability[which]) if which.any() else None)


def _finite(logp: np.ndarray) -> np.ndarray:
    return logp[np.isfinite(logp)].astype(np.float64)


def worst_tokens(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> list[WorstToken]:
    """The tokens whose log-probabilities differ most: sequence, position and both values."""
    closeness = -np.abs(log_ratios(np.concatenate(trainer), np.concatenate(sampler)))
    ends = np.cumsum([len(x) for x in sampler])
    worst = []
    # Few are sorted: those that are no closer than the last of the worst.
    last = np.partition(closeness, _WORST - 1)[_WORST - 1] if len(closeness) > _WORST else 0.0
    candidates = np.flatnonzero(~(closeness > last))
    for index in candidates[np.argsort(closeness[candidates], kind="stable")][:_WORST]:
        i = int(np.searchsorted(ends, index, side="right"))
        position = int(index - (ends[i - 1] if i else 0))
        if closeness[index] < 0:
            worst.append(WorstToken(i, position, float(trainer[i][position]), float(sampler[i][position])))
    return worst


def _estimators(d: np.ndarray) -> dict[str, np.ndarray]:
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}


def kept_lengths(kept: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """How many tokens of each sequence are kept. kept: [C] bool; lengths add up to C."""
    return np.add.reduceat(kept.astype(int), np.concatenate([[0], np.cumsum(lengths)[:-1]])).tolist()


def mean_ratio(d: np.ndarray, lengths: Sequence[int]) -> MeanRatio:
    """The mean of r over all tokens but those with an infinite ratio, its error, and the evidence.

    d: [C] log ratios. lengths: tokens of each sequence.
    """
    finite = ~infinite(d)
    r = np.exp(d[finite])
    return MeanRatio(mean(r), standard_error(r, kept_lengths(finite, lengths)), evidence(r))


def evidence(r: np.ndarray) -> float:
    """Nats of evidence that the tokens were not drawn from the sampler's column, from their ratios r [n].

    Whoever stakes a share c of a capital of 1 on each token ends with prod(1 + c (r - 1)). Where the tokens
    were drawn from the sampler's column, and no trainer has more than its whole mass, E[r] <= 1 given the
    tokens before. Then the capital grows to exp(x) with probability exp(-x) at most (Ville's inequality).
    This holds for ratios of any tail, for any number of tokens, and for tokens that depend on each other.
    With c = 1 it is the likelihood ratio of the two columns. The capital is spread over _STAKES.
    """
    with np.errstate(divide="ignore"):
        capitals = [float(np.log1p(c * (r - 1.0)).sum()) for c in _STAKES]
    return max(capitals) - math.log(len(_STAKES))


def _exp(x: float) -> float:
    return math.exp(x) if not x >= 700 else math.inf


def _by_position(d: np.ndarray, lengths: Sequence[int]) -> list[Bucket]:
    """Mean and maximum of |d| by position in the completion, in buckets that double: 0, 1, 2-3, 4-7, ...

    Positions count from 0.
    """
    position = np.concatenate([np.arange(n) for n in lengths])
    bucket = np.where(position == 0, 0, np.floor(np.log2(np.maximum(position, 1))).astype(int) + 1)
    rows = []
    for b in np.unique(bucket):
        known = np.abs(rest(d[bucket == b]))
        first = 0 if b == 0 else 1 << (int(b) - 1)
        rows.append(
            Bucket(
                first=first,
                last=0 if b == 0 else 2 * first - 1,
                tokens=len(known),
                left_out=int((bucket == b).sum()) - len(known),
                mean_abs=mean(known),
                max_abs=largest(known),
            )
        )
    return rows


def _histogram(d: np.ndarray) -> Histogram:
    """The histogram of the ratio r, with buckets of equal width in d."""
    edge = max(float(np.abs(d).max(initial=0.0)), 1e-12)
    counts, edges = np.histogram(d, bins=45, range=(-edge, edge))
    with np.errstate(over="ignore"):
        ratio_edges = np.exp(edges)
    return Histogram(ratio_edges.tolist(), edges.tolist(), counts.tolist())
