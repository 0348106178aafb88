"""Advantages from rewards. rewards, A [P, G] fp64: P prompts, G samples each.

    mean              A = r - mean_g(r)                        (Dr. GRPO, arXiv:2503.20783)
    std               A = (r - mean_g(r)) / (std_g(r) + eps)   (GRPO, arXiv:2402.03300)
    leave_one_out     A = r - mean of the other samples        (RLOO, arXiv:2402.14740)
    batch             A = (r - mean(r)) / (std(r) + eps)       (REINFORCE++, arXiv:2501.03262)

mean_g and std_g are of a group, mean and std of the whole step. std is the sample standard deviation (n - 1).
A group whose rewards are all equal has A = 0 exactly. So has a sample that is not trained on; it counts in no
mean. Sums are correctly rounded (math.fsum), so the order of the samples decides nothing.
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


def advantages(rewards: np.ndarray, kind: str, trained: np.ndarray | None = None) -> np.ndarray:
    """A [P, G] from rewards [P, G]. `kind`: mean, std, leave_one_out or batch.

    trained [P, G] bool: which samples are trained on; all where it is None.
    """
    trained = np.ones(rewards.shape, bool) if trained is None else trained
    A = np.zeros(rewards.shape)
    if kind == "batch":
        A[trained] = _whitened(rewards[trained].tolist())
        return A
    for row, group, members in zip(A, rewards, trained, strict=True):
        row[members] = _of_group(group[members].tolist(), kind)
    return A


def _whitened(rewards: list[float]) -> np.ndarray:
    if all_equal(rewards):
        return np.zeros(len(rewards))
    return (np.array(rewards) - _mean(rewards)) / (_std(rewards) + _EPS)


def _of_group(group: list[float], kind: str) -> np.ndarray:
    """The advantages of a group, [<= G]."""
    G = len(group)
    centred = np.zeros(G) if all_equal(group) else np.array(group) - _mean(group)
    if kind == "std" and G:
        centred = centred / (_std(group) + _EPS)
    elif kind == "leave_one_out" and G > 1:
        centred = centred * (G / (G - 1))  # r - (sum - r) / (G - 1)
    return centred


def all_equal(group: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal. Such a group does not show which sample was better."""
    return all(r == group[0] for r in group)
