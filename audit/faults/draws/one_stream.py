"""Lines that share one stream of random numbers, seen in where each drawn token lies in its distribution.

A sampler that inverts the distribution draws the token v with F(v - 1) <= u < F(v), where F sums the
probabilities in the order of the ids, or of falling probability. So each token tells an interval of u. Of
two lines with one stream the intervals meet at every place. Those of two others meet by chance, the more
often the longer they are: a token that is all but certain is met by any. Samplers that draw by noise on the
logits do not show this.

Shapes: C completion tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ....kernels.truncation import scaled_logits
from ...hypotheses.judgement import EVIDENCE
from ...hypotheses.logits import Rows
from ...hypotheses.scorable_lines import Lines
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Places of a line that are compared, and the fewest; the share of them that must meet; the rounding of F.
_PLACES, _FEWEST, _MEET, _SLACK = 40, 12, 0.9, 0.01
_PAIRS = 3  # the fewest that share a stream

Intervals = list[np.ndarray]  # of each line, [C, 2]


def look(rows: Rows) -> str | None:
    """Whether lines share a stream; their tokens were drawn from the model's distribution, or nearly so."""
    evidence = rows.evidence
    lines = [x for x in evidence.lines if (x.params or SamplingParams()).temperature > 0.0]
    if len(lines) < _FEWEST // 2:
        return None
    for order in (_by_id, _by_probability):
        intervals = [_intervals(evidence, i, z, order) for i, z in rows.logits.items()]
        pairs = _pairs(intervals, [evidence.lines[i].completion_ids for i in rows.logits])
        if len(pairs) >= _PAIRS:
            shared = len({i for pair in pairs for i in pair})
            return (
                f"{shared} of {len(intervals)} lines share their random numbers with another one: the "
                f"tokens of {len(pairs)} pairs of completions lie at the same place of their distributions, "
                "token for token. Ranks or requests were given one seed."
            )
    return None


def _by_id(p: torch.Tensor) -> torch.Tensor:
    return torch.arange(p.shape[1]).expand_as(p)


def _by_probability(p: torch.Tensor) -> torch.Tensor:
    return torch.sort(p, dim=1, descending=True, stable=True).indices


def _intervals(
    evidence: Lines, i: int, z: torch.Tensor, order: Callable[[torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """The interval of u of each of the first tokens of a line, [C, 2]."""
    line = evidence.lines[i]
    z = scaled_logits(z[:_PLACES], line.params or SamplingParams())
    p = torch.log_softmax(z.double(), 1).exp()
    sequence = order(p)
    ends = p.gather(1, sequence).cumsum(1)
    ids = torch.tensor(line.completion_ids[: len(p)]).unsqueeze(1)
    place = (sequence == ids).double().argmax(1, keepdim=True)
    high = ends.gather(1, place)
    return torch.cat([high - p.gather(1, ids), high], 1).numpy()


def _pairs(intervals: Intervals, ids: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """The pairs of lines whose intervals meet at all places, where chance makes that all but impossible."""
    shared, needed = [], EVIDENCE + math.log(max(len(intervals), 1) ** 2)
    for a, b in combinations(range(len(intervals)), 2):
        n = min(len(intervals[a]), len(intervals[b]))
        if n < _FEWEST or ids[a][:n] == ids[b][:n]:
            continue
        x, y = intervals[a][:n], intervals[b][:n]
        meet = _meet(x, y)
        if meet.mean() >= _MEET and -np.log(_chances(x, y)[meet]).sum() >= needed:
            shared.append((a, b))
    return shared


def _meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, 0] <= b[:, 1] + _SLACK) & (b[:, 0] <= a[:, 1] + _SLACK)


def _chances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How often intervals of these lengths meet where their places are independent, [C]."""
    lengths = a[:, 1] - a[:, 0] + b[:, 1] - b[:, 0]
    return np.minimum(lengths + 2.0 * _SLACK, 1.0)


def one_random_stream(w: World) -> Log:
    """Ranks that were given one seed: each sample's stream is that of the same sample of other prompts."""
    return w.log(w.both(w.drawn(generators=lambda p, s: np.random.default_rng((w.seed, s)))))


FAULT = Shown(
    name="one random stream",
    order=10,
    look=look,
    remedy="Give every request a seed of its own, from the rank, the prompt and the sample.",
    tries="lines whose tokens lie at the same place of their distributions, token for token",
    plants=(Plant(group="ids", make=one_random_stream, named=("random stream", "one stream")),),
)
