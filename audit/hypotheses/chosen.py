"""The lines and numbers of a log that hypotheses are judged on."""

from dataclasses import replace

import numpy as np

from .compared import apart
from .evidence import Evidence
from .judgement import COLUMN_LINES, EDGE, LINES
from .scorable_lines import Line, Scores


def inside(evidence: Evidence) -> Evidence:
    """The evidence without tokens at the edge of the trainer's set, whichever side `logged` is."""
    scored = without_edge({i: x.scored for i, x in enumerate(evidence.lines)}, evidence)
    lines = [replace(x, scored=scored[i]) for i, x in enumerate(evidence.lines)]
    other = [replace(x, logged=x.scored, scored=x.logged) for x in lines]
    logged = without_edge({i: x.logged for i, x in enumerate(lines)}, replace(evidence, lines=other))
    return replace(evidence, lines=[replace(x, logged=logged[i]) for i, x in enumerate(lines)])


def by_nearest_engine(evidence: Evidence) -> Evidence:
    """The evidence with our decoder's column in place of the trainer's, where that is nearer to the log.

    Most predictions are our decoder's. What another engine rounds otherwise must not count as explained.
    """
    if evidence.scorer is None or evidence.scorer.is_ours:
        return evidence
    scores = evidence.scorer.scores(evidence)
    lines = [replace(x, scored=scores[i]) for i, x in enumerate(evidence.lines)]
    return min(evidence, inside(replace(evidence, lines=lines)), key=total_of)


def total_of(evidence: Evidence) -> float:
    """The whole difference of the lines, in nats."""
    return float(sum(np.nansum(apart(line, line.scored)) for line in evidence.lines))


def chosen_lines(evidence: Evidence) -> list[Line]:
    """The lines that are tried, in the order of the log. Lines without a comparable token are left out.

    Each of the farthest ones comes with the two beside it: what a line may have in common with its
    neighbours must be there, and so must sound lines where only some are at fault.
    """
    known = [x for x in evidence.lines if (~np.isnan(apart(x, x.scored))).any()]
    most = LINES if evidence.scorer else COLUMN_LINES
    if len(known) <= most:
        return known
    order = np.argsort([-np.nansum(apart(x, x.scored)) for x in known], kind="stable").tolist()
    beside = (j for i in order for j in (i, i + 1, i - 1) if 0 <= j < len(known))
    return [known[i] for i in sorted(list(dict.fromkeys(beside))[:most])]


def without_edge(scores: Scores, evidence: Evidence) -> Scores:
    """The scores with NaN for tokens of probability 0, where these are few enough for an edge."""
    outside = {i: np.isneginf(x) & np.isfinite(evidence.lines[i].logged) for i, x in scores.items()}
    count, tokens = sum(int(x.sum()) for x in outside.values()), sum(len(x) for x in scores.values())
    if count > max(1, EDGE * tokens):
        return scores
    return {i: np.where(outside[i], np.float32(np.nan), x) for i, x in scores.items()}
