"""Advantages from rewards. rewards, A [P, G] fp64: P prompts, G samples each.

    mean              A = r - mean_g(r)                        (Dr. GRPO, arXiv:2503.20783)
    std               A = (r - mean_g(r)) / (std_g(r) + eps)   (GRPO, arXiv:2402.03300)
    leave_one_out     A = r - mean of the other samples        (RLOO, arXiv:2402.14740)
    batch             A = (r - mean(r)) / (std(r) + eps)       (REINFORCE++, arXiv:2501.03262)

mean_g and std_g are of a group, mean and std of the whole step. std is the sample standard deviation (n - 1).
A group whose rewards are all equal has A = 0 exactly. Sums are correctly rounded (math.fsum), so the order of
the samples decides nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

# It keeps the division finite for an all-equal group. The value is TRL's.
_EPS = 1e-4


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    m = _mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / max(1, len(values) - 1))


def advantages(rewards: np.ndarray, kind: str) -> np.ndarray:
    """A [P, G] from rewards [P, G]. `kind`: mean, std, leave_one_out or batch."""
    if kind == "batch":
        step_rewards = rewards.reshape(-1).tolist()
        if all_equal(step_rewards):
            return np.zeros_like(rewards)
        return (rewards - _mean(step_rewards)) / (_std(step_rewards) + _EPS)
    rows = []
    for group in rewards.tolist():
        G = len(group)
        centred = np.zeros(G) if all_equal(group) else np.array(group) - _mean(group)
        if kind == "std":
            centred = centred / (_std(group) + _EPS)
        elif kind == "leave_one_out":
            centred = centred * (G / (G - 1))  # r - (sum - r) / (G - 1)
        rows.append(centred)
    return np.stack(rows)


def all_equal(group: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal. Such a group does not show which sample was better."""
    return all(r == group[0] for r in group)
