"""Generalised advantage estimation over the drawn tokens of a trajectory (Schulman et al., arXiv:1506.02438).

    delta_c = r_c + gamma V_(c+1) - V_c
    A_c = delta_c + gamma lambda A_(c+1) = sum over l >= 0 of (gamma lambda)^l delta_(c+l)

c counts the drawn tokens, C of them. V_c is the critic's value of the ids before token c, and V_(C+1) that of
the whole trajectory. r_c is the reward of a turn at the last token of the turn, and 0 elsewhere. Time passes
with drawn tokens only: what stands between two turns is part of the step from one token to the next. The
critic's targets are A + V.

The sum is in fp64, by the recursion from the last token to the first. So a token's bits depend on the later
tokens of its own trajectory only.

Shapes: T ids of the trajectory, N turns.
"""

from collections.abc import Sequence

import numpy as np


def turn_end_rewards(
    drawn: np.ndarray, turn_starts: Sequence[int], turn_rewards: Sequence[float]
) -> np.ndarray:
    """[T] fp64: the reward of each turn at the last drawn token of the turn, and 0 elsewhere.

    drawn [T] bool; turn_starts [N]: the place of each turn's first drawn token, rising; turn_rewards [N]. All
    three are those of a Rollout and of its Episodes. Raises ValueError where they contradict each other.
    """
    starts, T = list(turn_starts), len(drawn)
    if len(turn_rewards) != len(starts):
        raise ValueError(f"gae: {len(turn_rewards)} rewards, and {len(starts)} turns; each has one reward")
    if starts != sorted(set(starts)) or not all(0 <= start < T and drawn[start] for start in starts):
        raise ValueError(f"gae: turn_starts ({starts}) must be rising places of drawn tokens, below {T}")
    rewards = np.zeros(T)
    for start, end, reward in zip(starts, [*starts, T][1:], turn_rewards, strict=True):
        rewards[start + int(np.flatnonzero(drawn[start:end])[-1])] = reward
    return rewards


def gae(rewards: np.ndarray, values: np.ndarray, drawn: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A [T] fp64 of the drawn tokens; 0 at ids that nobody drew.

    rewards, values [T]: of each token, and of the ids before it; only places of drawn tokens are read.
    drawn [T] bool. gamma, lam: the discount and lambda, of a drawn token, 0 to 1. Raises ValueError for other
    shapes, gamma or lam.
    """
    if not rewards.shape == values.shape == drawn.shape == (len(drawn),):
        shapes = f"{rewards.shape}, {values.shape} and {drawn.shape}"
        raise ValueError(f"gae: rewards, values and drawn ({shapes}) must be [T]")
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"gae: {name} ({value}) must lie in 0 to 1")
    A, advantage, next_value = np.zeros(len(drawn)), 0.0, 0.0
    for t in np.flatnonzero(drawn)[::-1].tolist():
        value = float(values[t])
        delta = float(rewards[t]) + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        A[t], next_value = advantage, value
    return A
