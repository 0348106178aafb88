"""How often the completions of one prompt draw the same token, beside what the sampler's column says."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ...verify.mismatch import standard_error
from ..formats.record import LoggedRollout

# Places that are looked at, at most.
_MOST_PLACES = 50_000


class Drawn(NamedTuple):
    """A completion of a log, its n drawn tokens with both log-probabilities."""

    group: int  # completions of one group continue one prompt, and were drawn alike
    ids: np.ndarray  # [C] of the whole completion
    positions: np.ndarray  # [n] of the drawn tokens, rising
    sampler: np.ndarray  # [n] fp32
    trainer: np.ndarray  # [n] fp32
    params: SamplingParams | None  # what the log declares


def group_of(rollout: LoggedRollout) -> int:
    """The same number for completions that continue one prompt, drawn alike with the same weights."""
    return hash((rollout.prompt_ids, rollout.step, rollout.weight_span, rollout.sampling_params))


@dataclass(frozen=True)
class Repeats:
    """How often completions of a prompt draw the same token, and how often the column says that they do."""

    places: int
    prompts: int
    same: float
    expected: float
    standard_error: float


def repeats(rollouts: Sequence[Drawn]) -> Repeats | None:
    """How often completions of one prompt draw the same token where they agree so far, and what is expected.

    At such a place n completions were drawn from one distribution p. Two of them draw the same token with
    probability sum p^2, and sum p^2 is also what the mean of p over the drawn tokens estimates. A place
    counts n - 1 times. The error is the larger of two: from the places with their groups as clusters, and
    from p itself. The second one does not vanish where no rare token happened to be drawn. None where no two
    completions share a prompt.
    """
    groups: dict[int, list[Drawn]] = defaultdict(list)
    for x in rollouts:
        groups[x.group].append(x)
    rows, lengths = [], []
    for group in groups.values():
        places = list(_places(group)) if len(group) > 1 else []
        if places and len(rows) < _MOST_PLACES:
            rows += places
            lengths.append(len(places))
    if not rows:
        return None
    weight, same, expected, variance = np.array(rows).T
    total = float(weight.sum())
    clustered = standard_error(weight * (same - expected), lengths) * len(rows)
    error = math.sqrt(float((weight**2 * variance).sum()))
    return Repeats(
        places=len(rows),
        prompts=len(lengths),
        same=float((weight * same).sum()) / total,
        expected=float((weight * expected).sum()) / total,
        standard_error=(error if math.isnan(clustered) else max(error, clustered)) / total,
    )


def _places(group: Sequence[Drawn]) -> Iterator[tuple[float, float, float, float]]:
    """Of each place that two completions have in common: weight, agreement, expectation and its variance."""
    logps = [dict(zip(x.positions.tolist(), x.sampler.tolist(), strict=True)) for x in group]
    for place, members, after in _common(group):
        p = [math.exp(min(logps[i][place], 0.0)) for i in members if place in logps[i]]
        if len(p) >= 2 and len(p) == sum(map(len, after.values())) == len(members):
            n = len(p)
            agreeing = sum(len(same) * (len(same) - 1) for same in after.values()) / (n * (n - 1))
            yield n - 1.0, agreeing, sum(p) / n, _variance(np.array(p))


def _common(group: Sequence[Drawn]) -> Iterator[tuple[int, list[int], dict[int, list[int]]]]:
    """Each place up to which completions agree: the place, these completions, and those that drew a token."""
    together = [(0, list(range(len(group))))]
    while together:
        place, members = together.pop()
        after: dict[int, list[int]] = defaultdict(list)
        for i in members:
            if place < len(group[i].ids):
                after[int(group[i].ids[place])].append(i)
        together += [(place + 1, same) for same in after.values() if len(same) > 1]
        yield place, members, after


def masses(rollouts: Sequence[Drawn]) -> list[float]:
    """Of each place where completions of a prompt agree so far and draw several tokens, the trainer's mass.

    It is the sum of the trainer's probabilities of these tokens: 1 at most, where its column is a
    distribution.
    """
    groups: dict[int, list[Drawn]] = defaultdict(list)
    for x in rollouts:
        groups[x.group].append(x)
    sums: list[float] = []
    for group in groups.values():
        if len(group) < 2 or len(sums) >= _MOST_PLACES:
            continue
        logps = [dict(zip(x.positions.tolist(), x.trainer.tolist(), strict=True)) for x in group]
        for place, _, after in _common(group):
            drawn = [logps[same[0]][place] for same in after.values() if place in logps[same[0]]]
            if len(drawn) > 1:
                sums.append(sum(math.exp(min(x, 0.0)) for x in drawn))
    return sums


def _variance(p: np.ndarray) -> float:
    """The variance of agreement - mean(p) at a place with n tokens drawn from p, estimated from p [n] itself.

    The difference is a U-statistic of 1[x = y] - (p(x) + p(y)) / 2 (Hoeffding, 1948), whose variance needs
    sum p^2 and sum p^3: the means of p and of p^2 over the drawn tokens.
    """
    n, square, cube = len(p), float(p.mean()), float((p * p).mean())
    projection_variance = max(cube - square * square, 0.0) / 4.0
    pair_variance = max(square - 1.5 * cube + 0.5 * square * square, 0.0)
    return (4.0 * (n - 2) * projection_variance + 2.0 * pair_variance) / (n * (n - 1))
