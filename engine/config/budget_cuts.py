"""Reasonings that are cut at budgets of tokens, and answered after each cut (budget_relative.py).

G reasonings of a prompt, m budgets, n answers after each cut. So a prompt has S = G (1 + m n) rollouts. Their
places in the step:

    g                      reasoning number g
    G + (g m + j) n + k    answer number k after the first b_j tokens of reasoning g

Rewards are of answers. The reward of a reasoning is the mean over budgets of the mean reward of its answers,
with the weights of the budgets. A reasoning that ended before a budget is cut at its end.
"""

import math
from typing import NamedTuple

import numpy as np


class Cuts(NamedTuple):
    """How the reasonings of a step are cut and answered.

    reasonings: G. budgets [m]: tokens, ascending. weights [m]: of the budgets; only their ratios count.
    answers: n.
    """

    reasonings: int
    budgets: tuple[int, ...]
    weights: tuple[float, ...]
    answers: int

    @property
    def rollouts(self) -> int:
        """Of a prompt, S."""
        return self.reasonings * (1 + len(self.budgets) * self.answers)

    def place(self, sample: int) -> tuple[int, int] | None:
        """The reasoning and the budget in tokens of the answer at place `sample`; None for a reasoning."""
        if sample < self.reasonings:
            return None
        cut = (sample - self.reasonings) // self.answers
        g, j = divmod(cut, len(self.budgets))
        return g, self.budgets[j]

    def sample(self, g: int, j: int, k: int) -> int:
        """The place of answer k to cut j of reasoning g; k and j count from 0."""
        return self.reasonings + (g * len(self.budgets) + j) * self.answers + k

    def by_cut(self, rewards: np.ndarray) -> np.ndarray:
        """[P, G, m, n] from the answers' values [P, G m n], or from those of all rollouts [P, S]."""
        values = rewards[:, -(self.rollouts - self.reasonings) :]
        return values.reshape(-1, self.reasonings, len(self.budgets), self.answers)

    def at_budgets(self, rewards: np.ndarray) -> np.ndarray:
        """The mean reward of the answers of each cut, [P, G, m], from what by_cut takes. Sums are exact."""
        return np.array(
            [[[math.fsum(r) / len(r) for r in cut] for cut in cuts] for cuts in self.by_cut(rewards).tolist()]
        )

    def with_reasonings(self, rewards: np.ndarray) -> np.ndarray:
        """The rewards of all rollouts [P, S] from those of the answers [P, G m n]."""
        total = math.fsum(self.weights)
        means = self.at_budgets(rewards).tolist()
        reasonings = [
            [math.fsum(map(float.__mul__, self.weights, r)) / total for r in group] for group in means
        ]
        return np.concatenate([np.array(reasonings), rewards], axis=1)
