"""The reward of a policy on problems of a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tasks.base import Problem
from ..tasks.rewards import Reward
from ..tasks.tokenizer import Tokenizer
from .types import GenerationParams, RngKey, Rollout, Sampler, complete


@dataclass(frozen=True)
class Evaluation:
    """The rewards [P, G] of completions, their rollouts in canonical order, and their texts [P][G]."""

    rewards: np.ndarray
    rollouts: list[Rollout]
    texts: list[list[str]]
    binary: bool = False  # whether the reward is 0 or 1 by its own word (see Reward)

    @property
    def mean_reward(self) -> float:
        """Mean over problems and samples."""
        return float(self.rewards.mean())

    @property
    def accuracy(self) -> float | None:
        """The share of completions that solve their problem; None for a graded reward."""
        return self.mean_reward if self.binary else None


def group_texts(tokenizer: Tokenizer, rollouts: Sequence[Rollout], num_generations: int) -> list[list[str]]:
    """Completion texts, [P][G]."""
    flat = [tokenizer.decode(r.completion_ids) for r in rollouts]
    return [flat[i : i + num_generations] for i in range(0, len(flat), num_generations)]


def evaluate(
    sampler: Sampler,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    prompt_ids: Sequence[Sequence[int]],
    reward: Reward,
    generation_params: GenerationParams,
    rng_key: RngKey,
) -> Evaluation:
    """Sample completions of each problem and compute their rewards. Raises ValueError (see Reward.values)."""
    rollouts = complete(sampler, prompt_ids, generation_params, rng_key)
    texts = group_texts(tokenizer, rollouts, generation_params.num_generations)
    return Evaluation(reward.values(problems, texts), rollouts, texts, reward.binary)
