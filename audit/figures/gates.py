"""What other projects gate on today: each has a number of its own, a name for it, and a bound.

With d = logp_trainer - logp_sampler of a token:

    prime-rl   mismatch_kl: the mean of exp(d) - 1 - d over tokens. At most 0.01: its tests of reverse-text
    slime      train_rollout_logprob_abs_diff: the mean of |d| of a completion, over completions. At most
               0.1: the default of --ci-train-rollout-logprob-abs-diff-threshold
    skyrl      the mean of |d| over tokens. Below 0.09: SkyRL's tests of dense models (its PR 1408)
    verl       rollout_probs_diff_mean: the mean of |p_trainer - p_sampler| over tokens. Below 0.01: its FAQ
               calls 0.005 healthy and 0.01 a fault
    nemo-rl    token_mult_prob_error: the mean of exp(|d|) over tokens. Below 1.05: NeMo-RL's test suites

The bounds are those of 2026. A token of an infinite ratio makes a figure infinite, but for verl's, which is
of probabilities; no bound holds then.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...verify.mismatch import log_ratios, mean

# A larger |d| counts as infinite: its exponential, many times over, has no place in fp64.
_LARGEST = 300.0


@dataclass(frozen=True)
class Columns:
    """The log-probabilities of the tokens, and d with the infinite ones marked. Shapes: C tokens."""

    trainer: np.ndarray  # [C] fp32
    sampler: np.ndarray  # [C] fp32
    lengths: Sequence[int]  # of the completions; they sum to C
    d: np.ndarray  # [C] fp64


def _k3(c: Columns) -> float:
    size = np.abs(c.d)
    with np.errstate(invalid="ignore"):
        return mean(np.where(np.isinf(size), math.inf, np.exp(c.d) - 1 - c.d))


def _abs_of_completions(c: Columns) -> float:
    parts = np.split(np.abs(c.d), np.cumsum(c.lengths)[:-1])
    return mean(np.array([mean(part) for part in parts]))


def _abs(c: Columns) -> float:
    return mean(np.abs(c.d))


def _probabilities(c: Columns) -> float:
    p_trainer, p_sampler = (np.exp(x.astype(np.float64)) for x in (c.trainer, c.sampler))
    return mean(np.abs(p_trainer - p_sampler))


def _exp_abs(c: Columns) -> float:
    return mean(np.exp(np.abs(c.d)))


@dataclass(frozen=True)
class _Gate:
    """A figure, what it is in words, and its bound, which it may reach or not."""

    figure: Callable[[Columns], float]
    words: str
    bound: float
    may_reach: bool


_GATES = {
    "prime-rl": _Gate(_k3, "mismatch_kl, the mean of exp(d) - 1 - d over tokens", 0.01, True),
    "slime": _Gate(
        _abs_of_completions,
        "train_rollout_logprob_abs_diff, the mean of |d| of a completion, over completions",
        0.1,
        True,
    ),
    "skyrl": _Gate(_abs, "the mean of |d| over tokens", 0.09, False),
    "verl": _Gate(_probabilities, "rollout_probs_diff_mean, the mean of |p - p| over tokens", 0.01, False),
    "nemo-rl": _Gate(_exp_abs, "token_mult_prob_error, the mean of exp(|d|) over tokens", 1.05, False),
}


@dataclass(frozen=True)
class GateFigure:
    """The number that a project gates on, and whether its bound holds."""

    figure: str  # in words
    value: float
    bound: float
    holds: bool


def gate_figures(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> dict[str, GateFigure]:
    """The figure of each project, by its name. trainer, sampler: logprobs [C] fp32 of each completion."""
    t, s = np.concatenate(trainer), np.concatenate(sampler)
    d = log_ratios(t, s)
    d = np.where(np.abs(d) > _LARGEST, np.copysign(math.inf, d), d)
    columns = Columns(t, s, [len(x) for x in sampler], d)
    figures = {}
    for name, gate in _GATES.items():
        value = gate.figure(columns)
        holds = value <= gate.bound if gate.may_reach else value < gate.bound
        figures[name] = GateFigure(gate.words, value, gate.bound, holds)
    return figures
