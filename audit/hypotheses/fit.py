"""Which hypothesis fits a log: each predicts what the log would hold, and the nearest prediction is named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .evidence import Evidence, Line, Scores
from .prediction import Prediction, Predictor
from .registry import HYPOTHESES, Hypothesis

# A difference of one token counts so many nats at most: an impossible token alone must not decide.
_MOST = 20.0
# A hypothesis fits if this share of the difference is left at most. It also fits if no more is left than
# rounding makes (_ROUNDING times its size), and less than _LESS of the difference.
_LEFT, _ROUNDING, _LESS = 0.1, 1.5, 0.4
# Rounding puts a token at the edge of a top-p set out of it now and then. Up to this share of such tokens,
# and one in any case, is left out.
_EDGE = 0.03
# Fewer tokens can be hit by chance: some hypotheses try dozens of values.
_FEWEST = 8
# Lines that are scored, those farthest apart first.
_LINES = 32
# Of a single number in fp32, in nats: what two sound fp32 forwards differ by.
_FP32 = 1e-5
# Times the size of rounding up to which a difference may be rounding alone.
BEYOND = 3.0


@dataclass(frozen=True)
class Row:
    """A hypothesis in its best form. Distances are in nats a token."""

    name: str
    what: str
    remedy: str
    distance: float  # before
    left: float  # after
    explained: float
    share_left: float
    tokens: int
    lines: int  # lines that it comes nearer to than the trainer's own scores
    lines_tried: int
    fits: bool


@dataclass(frozen=True)
class Tried:
    """What every hypothesis says to a log, and which one fits.

    Distances are means of |logged - predicted| over the tokens, in nats.
    """

    distance: float
    tokens: int
    rounding: float = _FP32  # what rounding alone makes of this model
    tried: int = 0
    need_a_model: int = 0
    found: Row | None = None
    also: list[str] = field(default_factory=list)  # others that fit as well, in words
    rows: list[Row] = field(default_factory=list)  # the nearest first

    @property
    def is_rounding(self) -> bool:
        """Whether the difference may be rounding alone."""
        return self.distance <= BEYOND * self.rounding


def explain(evidence: Evidence, predictors: Mapping[str, Predictor]) -> Tried:
    """Try the hypotheses that have a predictor, by name; the others need a model."""
    evidence = replace(evidence, lines=_farthest(_inside(evidence)))
    gaps = np.concatenate([np.empty(0), *(_gaps(line, line.scored) for line in evidence.lines)])
    gaps = gaps[~np.isnan(gaps)]
    result = Tried(float(gaps.mean()) if len(gaps) else 0.0, len(gaps))
    if result.tokens < _FEWEST or not result.distance:
        return result
    rounding = max(evidence.scorer.rounding_size(evidence), _FP32) if evidence.scorer else _FP32
    evidence = _by_nearest_engine(evidence)
    rows = []
    for hypothesis in HYPOTHESES:
        if predict := predictors.get(hypothesis.name):
            fits = [_fit(hypothesis, p, evidence, rounding) for p in predict(evidence)]
            rows += [min(known, key=lambda row: row.share_left)] if (known := [x for x in fits if x]) else []
    tried = sum(hypothesis.name in predictors for hypothesis in HYPOTHESES)
    nearest = _nearest([row for row in rows if row.fits])
    return replace(
        result,
        rounding=rounding,
        tried=tried,
        need_a_model=len(HYPOTHESES) - tried,
        found=nearest[0] if nearest else None,
        also=[row.what for row in nearest[1:]],
        rows=sorted(rows, key=lambda row: row.share_left),
    )


def _nearest(fitting: Sequence[Row]) -> list[Row]:
    """Those that leave the least. To within rounding they cannot be told apart; the first is the simplest."""
    least = min((row.left for row in fitting), default=0.0)
    return [row for row in fitting if row.left <= 1.1 * least + 0.1 * _FP32]


def _inside(evidence: Evidence) -> Evidence:
    """The evidence without tokens at the edge of the trainer's set."""
    scored = _without_edge({i: x.scored for i, x in enumerate(evidence.lines)}, evidence)
    return replace(evidence, lines=[replace(x, scored=scored[i]) for i, x in enumerate(evidence.lines)])


def _by_nearest_engine(evidence: Evidence) -> Evidence:
    """The evidence with our decoder's column in place of the trainer's, where that is nearer to the log.

    Most predictions are our decoder's. What another engine rounds otherwise must not count as explained.
    """
    if evidence.scorer is None or evidence.scorer.is_ours:
        return evidence
    scores = evidence.scorer.scores(evidence)
    lines = [replace(x, scored=scores[i]) for i, x in enumerate(evidence.lines)]
    return min(evidence, _inside(replace(evidence, lines=lines)), key=_total)


def _total(evidence: Evidence) -> float:
    """The whole difference of the lines, in nats."""
    return float(sum(np.nansum(_gaps(line, line.scored)) for line in evidence.lines))


def _farthest(evidence: Evidence) -> list[Line]:
    """The lines farthest apart, in the order of the log. Lines without a comparable token are left out."""
    known = [x for x in evidence.lines if (~np.isnan(_gaps(x, x.scored))).any()]
    totals = [np.nansum(_gaps(x, x.scored)) for x in known]
    return [known[i] for i in sorted(np.argsort(totals)[::-1][:_LINES])]


def _without_edge(scores: Scores, evidence: Evidence) -> Scores:
    """The scores with NaN for tokens of probability 0, where these are few enough for an edge."""
    outside = {i: np.isneginf(x) & np.isfinite(evidence.lines[i].logged) for i, x in scores.items()}
    count, tokens = sum(int(x.sum()) for x in outside.values()), sum(len(x) for x in scores.values())
    if count > max(1, _EDGE * tokens):
        return scores
    return {i: np.where(outside[i], np.float32(np.nan), x) for i, x in scores.items()}


def _gaps(line: Line, scores: np.ndarray) -> np.ndarray:
    """|logged - scores| of a line's tokens, [C] fp64; NaN where either is unknown."""
    with np.errstate(invalid="ignore"):
        d = np.abs(line.logged.astype(np.float64) - scores)
    # Both columns at -inf are equal.
    return np.minimum(np.where(np.isinf(line.logged) & (line.logged == scores), 0.0, d), _MOST)


def _fit(
    hypothesis: Hypothesis,
    prediction: Prediction,
    evidence: Evidence,
    rounding: float,
) -> Row | None:
    """How well a prediction fits the lines that it is about; None where it is about too few tokens.

    A line for which it is worse than the trainer's own scores keeps those: a fault need not be in each line.
    """
    before = after = 0.0
    tokens = lines = 0
    for i, scores in _without_edge(prediction.scores, evidence).items():
        now, d = _gaps(evidence.lines[i], evidence.lines[i].scored), _gaps(evidence.lines[i], scores)
        both = ~np.isnan(d) & ~np.isnan(now)
        a, b = float(now[both].sum()), float(d[both].sum())
        before, after, tokens = before + a, after + min(a, b), tokens + int(both.sum())
        lines += b < a
    if tokens < _FEWEST or not before:
        return None
    share, left = after / before, after / tokens
    # A difference that is itself of the size of rounding needs no explanation but an exact one.
    beyond = before / tokens > BEYOND * rounding
    fits = share <= _LEFT or (beyond and left <= _ROUNDING * rounding and share <= _LESS)
    # It must speak of most of the difference, or of the lines that were chosen as the farthest apart.
    fits = fits and (prediction.searched or before >= 0.5 * _total(evidence))
    return Row(
        name=hypothesis.name,
        what=prediction.what,
        remedy=hypothesis.remedy,
        distance=before / tokens,
        left=left,
        explained=(before - after) / tokens,
        share_left=share,
        tokens=tokens,
        lines=lines,
        lines_tried=len(prediction.scores),
        fits=bool(fits),
    )
