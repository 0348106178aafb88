"""Budget-relative advantages of a thought that is cut at several budgets (BRPO, arXiv:2505.13438).

A thought is cut at m budgets of tokens, b_1 < ... < b_m, and from each cut the model gives an answer, with a
reward r_j. w_j is the weight of budget j, and the weights add up to 1. A group is G thoughts of one prompt.

    R_j = sum over i >= j of w_i r_i                    the return of the tokens from b_(j-1) to b_j
    E_j = mean over i < j of r_i, weights 2^i           what the same thought has earned so far
    B_j = (j - 1) / m E_j sum over i >= j of w_i + (m - j + 1) / m mean_group(R_j)
    A_j = R_j - B_j                                     the advantage of these tokens

The first budget has nothing before it, so B_1 is the group's mean. The later a budget is, the more its
baseline comes from the thought itself. The weights 2^i are the paper's decay of 1/2 towards earlier budgets.
Where all rewards of a group are equal, A = 0 exactly.

The answers are trained apart from the thoughts: A = r - mean over the answers after the same cut. The weights
w_j are no part of it, as the paper trains the answers of all budgets alike (decoupled optimization). Where a
thought ended before two budgets, both have the same cut, and their answers are one group, as in the authors'
code.

Sums are correctly rounded (math.fsum), so the order of the thoughts decides no bit.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from ...config.budget_cuts import Cuts
from .advantage import all_equal


def budget_relative_advantages(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """A [G, m] of a group, from rewards [G, m]. weights [m]: of the budgets; they are divided by their sum.

    Where a thought has several answers for a budget, its reward is their mean. Raises ValueError for weights
    that are not m numbers of at least 0, one of them above 0.
    """
    G, m = rewards.shape
    if len(weights) != m or not all(0 <= w < math.inf for w in weights) or not any(weights):
        raise ValueError(
            f"budget_relative_advantages: weights ({list(weights)}) must be {m} numbers, none below 0 and "
            "one above 0"
        )
    share = [w / math.fsum(weights) for w in weights]
    A, thoughts = np.zeros((G, m)), rewards.tolist()
    if all_equal([r for thought in thoughts for r in thought]):
        return A
    for j in range(m):  # from 0 here, and from 1 in the equations
        returns = [_dot(share[j:], thought[j:]) for thought in thoughts]
        mean, left = math.fsum(returns) / len(returns), math.fsum(share[j:])
        answered = [_so_far(thought[:j]) * left for thought in thoughts]
        A[:, j] = [R - (j * E + (m - j) * mean) / m for R, E in zip(returns, answered, strict=True)]
    return A


def cut_advantages(rewards: np.ndarray, lengths: np.ndarray, cuts: Cuts) -> list[np.ndarray]:
    """A [P S][C] fp64 of the drawn tokens of thoughts and answers, in the order of budget_cuts.py.

    rewards, lengths [P, S]: of all rollouts, lengths in drawn tokens; a thought has at most those of the last
    budget. A token of a thought counts for each cut that holds it: it has the advantage of the first of them.
    """
    A: list[np.ndarray] = []
    for means, answers, lengths_of_prompt in zip(
        cuts.at_budgets(rewards), cuts.by_cut(rewards), lengths.tolist(), strict=True
    ):
        thought_advantages = budget_relative_advantages(means, cuts.weights)
        thoughts = lengths_of_prompt[: cuts.reasonings]
        for segments, C in zip(thought_advantages, thoughts, strict=True):
            A.append(np.repeat(segments, np.diff(_ends(cuts, C), prepend=0)))
        answer_advantages = [a for C, r in zip(thoughts, answers, strict=True) for a in _centred(cuts, C, r)]
        A += [
            np.full(n, a)
            for a, n in zip(answer_advantages, lengths_of_prompt[cuts.reasonings :], strict=True)
        ]
    return A


def _ends(cuts: Cuts, length: int) -> list[int]:
    """The tokens of a thought before each of its cuts, [m]. length: all of its tokens."""
    return [min(b, length) for b in cuts.budgets]


def _centred(cuts: Cuts, length: int, rewards: np.ndarray) -> Iterator[float]:
    """The advantages of a thought's answers, budget by budget. rewards [m, n]."""
    pairs = zip(_ends(cuts, length), rewards.tolist(), strict=True)
    for _, same_cut in groupby(pairs, key=lambda pair: pair[0]):
        group = [r for _, rewards_of_budget in same_cut for r in rewards_of_budget]
        mean = group[0] if all_equal(group) else math.fsum(group) / len(group)
        yield from (r - mean for r in group)


def _so_far(rewards: list[float]) -> float:
    """The mean of the rewards of earlier budgets, each with twice the weight of the one before; 0 of none."""
    weights = [2.0**i for i in range(len(rewards))]
    return _dot(weights, rewards) / math.fsum(weights) if rewards else 0.0


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
