"""Accuracy of a policy on problems of a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.logprob import Distribution
from .rollout import Keys, Rollout, Sampler, Sampling
from .tasks import Reward, rewards
from .tasks.base import Problem
from .text import Text


@dataclass(frozen=True)
class Evaluation:
    """Rewards [P, G] of completions, and the rollouts they were drawn in, in canonical order."""

    rewards: np.ndarray
    rollouts: list[Rollout]
    texts: list[list[str]]

    @property
    def mean_reward(self) -> float:
        """Mean over problems and samples: the accuracy, for a reward of 0 or 1."""
        return float(self.rewards.mean())


def group_texts(text: Text, rollouts: Sequence[Rollout], samples: int) -> list[list[str]]:
    """Completion texts, [P][G]."""
    flat = [text.decode(r.completion_ids) for r in rollouts]
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]


def evaluate(
    sampler: Sampler, text: Text, problems: Sequence[Problem], prompt_ids: Sequence[Sequence[int]], reward: Reward,
    distribution: Distribution, samples: int, max_tokens: int, keys: Keys,
) -> Evaluation:  # fmt: skip
    """Sample `samples` completions of each problem and score them. Raises ValueError (see tasks.rewards)."""
    sampling = Sampling(distribution, samples, max_tokens, text.stop_ids)
    rollouts = sampler.generate(prompt_ids, sampling, keys)
    texts = group_texts(text, rollouts, samples)
    return Evaluation(rewards(reward, problems, texts), rollouts, texts)
