"""What a project gates on: a number of its own, with its name there and its bound.

With d = logp_trainer - logp_sampler of a token. The bounds are those of 2026. A token of an infinite ratio
makes a figure infinite, unless it is one of probabilities; no bound holds then.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...verify.mismatch import log_ratios

# A larger |d| counts as infinite: its exponential, many times over, has no place in fp64.
_LARGEST = 300.0


@dataclass(frozen=True)
class Columns:
    """The log-probabilities of the tokens, and d with the infinite ones marked. Shapes: C tokens."""

    trainer: np.ndarray  # [C] fp32
    sampler: np.ndarray  # [C] fp32
    lengths: Sequence[int]  # of the completions; they sum to C
    d: np.ndarray  # [C] fp64


def joined(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> Columns:
    """The columns of a log. trainer, sampler: logprobs [C] fp32 of each completion."""
    t, s = np.concatenate(trainer), np.concatenate(sampler)
    d = log_ratios(t, s)
    d = np.where(np.abs(d) > _LARGEST, np.copysign(math.inf, d), d)
    return Columns(t, s, [len(x) for x in sampler], d)


@dataclass(frozen=True)
class GateFigure:
    """The number that a project gates on, and whether its bound holds."""

    figure: str  # in words
    value: float
    bound: float
    holds: bool


@dataclass(frozen=True)
class Gate:
    """A figure and its bound, as a framework's file declares them."""

    figure: Callable[[Columns], float]
    # Its name in the project, or "".
    name: str
    # What it is.
    words: str
    bound: float
    # Whether the figure may be as large as the bound.
    may_reach: bool
    # Where the bound is from.
    source: str

    def judged(self, columns: Columns) -> GateFigure:
        """The figure of these columns, and whether it holds the bound."""
        value = self.figure(columns)
        holds = value <= self.bound if self.may_reach else value < self.bound
        words = f"{self.name}, {self.words}" if self.name else self.words
        return GateFigure(words, value, self.bound, holds)
