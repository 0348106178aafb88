"""Accuracy of a policy on problems of a task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tasks.base import Problem
from ..tasks.executor import Executor
from ..tasks.rewards import Reward, rewards
from ..tasks.tokenizer import Tokenizer
from .types import GenerationParams, RngKey, Rollout, Sampler


@dataclass(frozen=True)
class Evaluation:
    """The rewards [P, G] of completions, their rollouts in canonical order, and their texts [P][G]."""

    rewards: np.ndarray
    rollouts: list[Rollout]
    texts: list[list[str]]

    @property
    def mean_reward(self) -> float:
        """Mean over problems and samples. It is the accuracy where every reward is 0 or 1."""
        return float(self.rewards.mean())


def group_texts(tokenizer: Tokenizer, rollouts: Sequence[Rollout], num_generations: int) -> list[list[str]]:
    """Completion texts, [P][G]."""
    flat = [tokenizer.decode(r.completion_ids) for r in rollouts]
    return [flat[i : i + num_generations] for i in range(0, len(flat), num_generations)]


def evaluate(
    sampler: Sampler,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    prompt_ids: Sequence[Sequence[int]],
    reward: Reward | Executor,
    generation_params: GenerationParams,
    rng_key: RngKey,
) -> Evaluation:
    """Sample completions of each problem and compute their rewards. Raises ValueError (see rewards)."""
    rollouts = sampler.generate(prompt_ids, generation_params, rng_key)
    texts = group_texts(tokenizer, rollouts, generation_params.num_generations)
    return Evaluation(rewards(reward, problems, texts), rollouts, texts)
