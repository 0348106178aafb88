"""Advantages from rewards. rewards, A [P, G] fp64: P prompts, G samples each; C drawn tokens of a sample.

    mean              A = r - mean_g(r)                        (Dr. GRPO, arXiv:2503.20783)
    std               A = (r - mean_g(r)) / (std_g(r) + eps)   (GRPO, arXiv:2402.03300)
    leave_one_out     A = r - mean of the other samples        (RLOO, arXiv:2402.14740)
    batch             A = (r - mean(r)) / (std(r) + eps)       (REINFORCE++, arXiv:2501.03262)
    pass_at_k         A = mean over S with the sample of (R(S) - mean_S(R)) / std_S(R)
                                                               (pass@k training, arXiv:2508.10751)

mean_g and std_g are of a group, mean and std of the whole step. std is the sample standard deviation (n - 1).
A group whose rewards are all equal has A = 0 exactly. So has a sample that is not trained on; it counts in no
mean. Sums are correctly rounded (math.fsum), so the order of the samples decides nothing.

For pass_at_k, S is any subset of k samples of a group, and R(S) is 1 where one of them is solved, or else 0.
mean_S and std_S are over all subsets; std_S divides by their number. Of n samples let c be solved, and

    q = C(n - c, k) / C(n, k)                   the share of subsets without a solved sample
    A = sqrt(q / (1 - q))                       of a solved sample
    A = -c / (n - c) sqrt(q / (1 - q))          of another sample

These are section 2.4 of the paper, A = (1 - mean_S) / std_S and A = (1 - mean_S - p) / std_S, with
mean_S = 1 - q, std_S = sqrt(q (1 - q)) and p = C(n - c - 1, k - 1) / C(n - 1, k - 1) = q n / (n - c). A group
in which all subsets have one reward has A = 0. So has a group of at most k samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# It keeps the division finite for an all-equal group. The value is TRL's.
_EPS = 1e-4


@dataclass(frozen=True)
class StepAdvantages:
    """The advantages of a step, as ledger and log have them.

    rows [P G]: the one advantage of a sample, [1]; or where the loss gives each token its own, those of the
    drawn tokens, [C]. shape: (P, G) in the first case, None in the second.
    """

    rows: Sequence[np.ndarray]
    shape: tuple[int, ...] | None = None

    @classmethod
    def of_samples(cls, A: np.ndarray) -> "StepAdvantages":
        """Those of a loss with one advantage of each sample, A [P, G]."""
        return cls(list(A.reshape(-1, 1)), A.shape)

    @property
    def values(self) -> np.ndarray:
        """All of them, [P, G] or one after another."""
        values = np.concatenate(self.rows)
        return values if self.shape is None else values.reshape(self.shape)

    def of_tokens(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """The advantage of each drawn token, [P G][C] fp64. lengths [P G]: C of each sample."""
        if self.shape is None:
            return list(self.rows)
        return of_tokens([float(row[0]) for row in self.rows], lengths)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    m = _mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / max(1, len(values) - 1))


def advantages(rewards: np.ndarray, kind: str, trained: np.ndarray | None = None, k: int = 1) -> np.ndarray:
    """A [P, G] from rewards [P, G]. `kind`: mean, std, leave_one_out, batch or pass_at_k.

    trained [P, G] bool: which samples are trained on; all where it is None. k: samples of a subset, at least
    1; only pass_at_k has subsets. Raises ValueError for pass_at_k with a reward that is neither 0 nor 1.
    """
    trained = np.ones(rewards.shape, bool) if trained is None else trained
    A = np.zeros(rewards.shape)
    if kind == "batch":
        A[trained] = _whitened(rewards[trained].tolist())
        return A
    for row, group, members in zip(A, rewards, trained, strict=True):
        group_rewards = group[members].tolist()
        row[members] = _pass_at_k(group_rewards, k) if kind == "pass_at_k" else _of_group(group_rewards, kind)
    return A


def of_tokens(A: Sequence[float], lengths: Sequence[int]) -> list[np.ndarray]:
    """The advantage of each token, [n] arrays of [C]: that of its sample. A [n]; lengths [n]: C of each."""
    return [np.full(C, a, np.float64) for a, C in zip(A, lengths, strict=True)]


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


def _pass_at_k(group: list[float], k: int) -> np.ndarray:
    """The advantages of a group, [<= G]. The binomials are whole numbers, and q is rounded once."""
    n, solved = len(group), np.array(group) == 1.0
    if graded := [r for r in group if r not in (0.0, 1.0)]:
        raise ValueError(f'loss.advantage ("pass_at_k"): the reward is {graded[0]}; it must be 0 or 1')
    c = int(solved.sum())
    failed, subsets = math.comb(n - c, k), math.comb(n, k)
    if not c or not failed:
        return np.zeros(n)
    A = math.sqrt(failed / (subsets - failed))
    return np.where(solved, A, -c / (n - c) * A)


def all_equal(group: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal. Such a group does not show which sample was better."""
    return all(r == group[0] for r in group)
