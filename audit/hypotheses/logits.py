"""The logits of the lines of a log, and a search for the number that comes nearest to it.

The logits are computed once. A search tries a grid, then smaller grids about the best value.

Shapes: C completion tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.softcap import softcap
from ...kernels.truncation import scaled_logits
from .hf_forward import HfForward
from .scorable_lines import Line, Lines, Scores
from .scores import Forward, hidden_rows

# Logits that are held at once, and those that a search reads again and again; of a larger vocabulary fewer
# lines are tried.
_MOST, _SEARCHED = 1 << 26, 1 << 24
# A token counts so many nats at most in a search: an edge of a filter must not decide it.
CAP = 1.0
# Smaller grids, and the most of them, of a value that each brings so much nearer: a top-p keeps exact tokens,
# and a coarse one leaves as much as chance does. (cases)
_ROUNDS, _MOST_ROUNDS, _NEARER, _POINTS = 4, 12, 0.7, 5

Found = tuple[float, Scores, int]  # the number, what the log would hold, and how many numbers were tried
Transform = Callable[[torch.Tensor, Line, float], torch.Tensor]
Change = Callable[[SamplingParams, float], SamplingParams]


@dataclass(frozen=True)
class Rows:
    """The logits of some lines, by index in Lines.lines: [C, V] fp32 on the CPU."""

    evidence: Lines
    logits: dict[int, torch.Tensor]

    @property
    def few(self) -> "Rows":
        """The lines farthest apart, as many as a search reads."""
        lines, chosen, held = self.evidence.lines, set(), 0
        for i in sorted(self.logits, key=lambda i: -_distance(lines[i].logged, lines[i].scored)):
            held += self.logits[i].numel()
            if chosen and held > _SEARCHED:
                break
            chosen.add(i)
        return Rows(self.evidence, {i: z for i, z in self.logits.items() if i in chosen})

    @torch.no_grad()
    def scores(self, transform: Transform | None, change: Change | None, x: float) -> Scores:
        """What the lines would hold with a number x."""
        result = {}
        for i, z in self.logits.items():
            line = self.evidence.lines[i]
            params = line.params or SamplingParams()
            z = transform(z, line, x) if transform else z
            logp = torch.log_softmax(scaled_logits(z, change(params, x) if change else params), -1)
            ids = torch.tensor(line.completion_ids).unsqueeze(1)
            result[i] = logp.gather(1, ids).squeeze(1).numpy()
        return result

    def likeliest(self, i: int) -> np.ndarray:
        """The largest log-probability of each place of a line, [C]."""
        params = self.evidence.lines[i].params or SamplingParams()
        return torch.log_softmax(scaled_logits(self.logits[i], params), 1).amax(1).numpy()

    def raw(self, i: int) -> np.ndarray:
        """The drawn tokens' log-probabilities without the sampling parameters, [C]."""
        ids = torch.tensor(self.evidence.lines[i].completion_ids).unsqueeze(1)
        return torch.log_softmax(self.logits[i], 1).gather(1, ids).squeeze(1).numpy()

    def loss(self, scores: Scores) -> float:
        """How far scores are from the log, in nats."""
        return sum(_distance(self.evidence.lines[i].logged, x) for i, x in scores.items())


def _distance(logged: np.ndarray, scores: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        d = np.minimum(np.abs(logged.astype(np.float64) - scores), CAP)
    return float(np.nansum(np.where(np.isneginf(scores), CAP, d)))


@torch.no_grad()
def rows_of(decoder: Forward, evidence: Lines) -> Rows:
    """The logits of the lines by a decoder, of as many as may be held."""
    lines, held = [], 0
    for i, line in enumerate(evidence.lines):
        held += len(line.completion_ids) * decoder.config.vocab_size
        if lines and held > _MOST:
            break
        lines.append(i)
    rows = hidden_rows(decoder, [evidence.lines[i].pair for i in lines])
    if isinstance(decoder, HfForward):
        return Rows(evidence, dict(zip(lines, rows, strict=True)))
    lm_head = decoder.logits_weight()
    cap = decoder.config.head.cap
    logits = [softcap((h.to(lm_head.dtype) @ lm_head.t()).float().cpu(), cap) for h in rows]
    return Rows(evidence, dict(zip(lines, logits, strict=True)))


def searched(
    rows: Rows, grid: Sequence[float], transform: Transform | None = None, change: Change | None = None
) -> Found:
    """The number of a hypothesis that comes nearest to the log."""
    few, tried = rows.few, {}

    def loss(x: float) -> float:
        if x not in tried:
            tried[x] = few.loss(few.scores(transform, change, x))
        return tried[x]

    points, before = [float(x) for x in grid], math.inf
    for number in range(_MOST_ROUNDS):
        best = min(points, key=loss)
        if number >= _ROUNDS and loss(best) > _NEARER * before:
            break
        before = loss(best)
        known = sorted(tried)
        i = known.index(min(known, key=loss))
        low, high = known[max(i - 1, 0)], known[min(i + 1, len(known) - 1)]
        points = [best, *np.linspace(low, high, _POINTS + 2)[1:-1].tolist()]
    best = min(tried, key=tried.get)
    return best, rows.scores(transform, change, best), len(tried)


def one_of(rows: Rows, values: Sequence[float], transform: Transform | None, change: Change | None) -> Found:
    """As `searched`, of given numbers alone."""
    few = rows.few
    best = min(values, key=lambda x: few.loss(few.scores(transform, change, x)))
    return best, rows.scores(transform, change, best), len(values)
