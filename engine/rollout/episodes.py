"""Episodes: what the model does with problems, and the reward of it. Training and evaluation play them.

An episode is a completion of a prompt, with a reward for its text; or a trajectory of many turns in an
environment (turns.py), which gives the rewards itself.

Shapes: P prompts, G generations of each. Where reasonings are cut and answered, G counts the answers too
(config/budget_cuts.py).
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np

from ..config.budget_cuts import Cuts
from ..tasks.base import Problem
from ..tasks.environment import VOID
from ..tasks.rewards import Reward
from ..tasks.tokenizer import Tokenizer
from .stopwatch import Stopwatch
from .types import GenerationParams, RngKey, Rollout, Sampler, complete


@dataclass(frozen=True)
class Episodes:
    """Rollouts in canonical order, with their texts and rewards."""

    problems: list[Problem]  # [P]; in a game, one after another for each player
    rollouts: list[Rollout]  # [P G]
    texts: list[list[str]]  # [P][G]
    rewards: np.ndarray  # [P, G]
    binary: bool = False  # whether the reward is 0 or 1 by its own word (see Reward)
    # For each rollout the reward of each turn, and why it ended in an error; None for completions.
    turn_rewards: list[list[float]] | None = None
    errors: list[str] | None = None
    # Which rollouts are reasonings, and which are answers to them; None where all are whole episodes.
    cuts: Cuts | None = None

    @property
    def trained(self) -> np.ndarray:
        """Which rollouts are trained on, [P, G] bool."""
        return np.array([is_trained(r) for r in self.rollouts]).reshape(self.rewards.shape)

    @property
    def lengths(self) -> np.ndarray:
        """The drawn tokens of each rollout, [P, G]."""
        return np.array([len(r.logprobs) for r in self.rollouts]).reshape(self.rewards.shape)

    def placed(self, values: np.ndarray) -> np.ndarray:
        """Values [n] of the rollouts that are trained on, in their places of [P, G]; 0 elsewhere."""
        trained = self.trained
        places = np.zeros(trained.shape)
        places[trained] = values
        return places

    @property
    def mean_reward(self) -> float:
        """Mean over problems and samples; without those that are not trained on, if there are others.

        Reasonings count, and not each answer to them.
        """
        rewards, trained = (x[:, : self.cuts and self.cuts.reasonings] for x in (self.rewards, self.trained))
        counted = rewards[trained]
        return float(counted.mean()) if counted.size else float(rewards.mean())

    @property
    def reward_at_budgets(self) -> dict[int, float]:
        """The mean reward of the answers after each budget of tokens; empty where no reasoning was cut."""
        if self.cuts is None:
            return {}
        by_budget = self.cuts.at_budgets(self.rewards).reshape(-1, len(self.cuts.budgets)).T.tolist()
        means = [math.fsum(rewards) / len(rewards) for rewards in by_budget]
        return dict(zip(self.cuts.budgets, means, strict=True))

    @property
    def accuracy(self) -> float | None:
        """The share of episodes that solve their problem; None for a graded reward."""
        return self.mean_reward if self.binary else None

    def group(self, p: int) -> "Episodes":
        """Those of one prompt."""
        G = self.rewards.shape[1]
        part = slice(p * G, (p + 1) * G)
        return Episodes(
            [self.problems[p]],
            self.rollouts[part],
            [self.texts[p]],
            self.rewards[p : p + 1],
            self.binary,
            self.turn_rewards and self.turn_rewards[part],
            self.errors and self.errors[part],
            self.cuts,
        )


def joined(groups: Sequence[Episodes]) -> Episodes:
    """Several episodes in one, in their order. There must be one at least."""

    def lists(parts: list[list | None]) -> list | None:
        return None if parts[0] is None else [item for part in parts for item in part]

    return Episodes(
        [problem for group in groups for problem in group.problems],
        [rollout for group in groups for rollout in group.rollouts],
        [texts for group in groups for texts in group.texts],
        np.concatenate([group.rewards for group in groups]),
        groups[0].binary,
        lists([group.turn_rewards for group in groups]),
        lists([group.errors for group in groups]),
        groups[0].cuts,
    )


def is_trained(rollout: Rollout) -> bool:
    """Whether a rollout is trained on: something was drawn, and it did not end in an error."""
    return bool(len(rollout.logprobs)) and rollout.finish not in VOID


@dataclass(frozen=True)
class Checked:
    """Problems that can be worked on, and how many tokens their rollouts have at most.

    prompt_ids: of each problem; empty where only an environment knows it. prompt_tokens: of what is
    continued. max_tokens: drawn. trajectory_tokens: of all; 0 where that is one prompt and one completion.
    """

    prompt_ids: list[list[int]]
    prompt_tokens: int
    max_tokens: int
    trajectory_tokens: int = 0


def longest(sequences: Sequence[Sequence[int]]) -> int:
    """The tokens of the longest; 0 where there is none."""
    return max(map(len, sequences), default=0)


class EpisodePlayer(Protocol):
    """Whoever plays the episodes of a run. players: prompts that each problem has, one for each player.

    reasoning_ends: the tokens that end a rollout beside the stop tokens, where answers follow it.
    """

    players: int = 1
    binary: bool
    reasoning_ends: frozenset[int] = frozenset()
    rewards_by_tokens: bool = True  # the rewards of a step follow from its tokens
    plays_by_place: bool = False  # the place of a prompt in its step decides what it is answered

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        """The prompts, as far as they are known before they are played, and how long rollouts get.

        max_tokens: of a completion. Raises ValueError for a problem that cannot be worked on: an answer that
        the reward cannot read, or a prompt that leaves no room in the context.
        """
        ...

    def play(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        """Episodes of the problems, each num_generations times. Raises ValueError."""
        ...


class CompletionPlayer(EpisodePlayer):
    """One completion of each prompt; a reward for its text. chat: see Tokenizer.encode.

    stopwatch: measures the rewards; None where nobody asks.
    """

    def __init__(self, tokenizer: Tokenizer, reward: Reward, chat: bool, stopwatch: Stopwatch | None = None):
        self.reward, self._tokenizer, self._chat = reward, tokenizer, chat
        self._station = stopwatch.station if stopwatch else nullcontext
        self._prompts: dict[tuple[str, str], list[int]] = {}
        # Steps may be played side by side (train/ahead.py). Only the sampler works on several at a time.
        self._one_at_a_time = Lock()

    @property
    def binary(self) -> bool:
        """Whether every reward is 0 or 1."""
        return self.reward.binary

    def check(self, problems: Sequence[Problem], max_tokens: int, context: int) -> Checked:
        self.reward.check_answers(problems)
        prompt_ids = [self._prompt(problem) for problem in problems]
        for ids, problem in zip(prompt_ids, problems, strict=True):
            if len(ids) + max_tokens > context:
                raise ValueError(
                    f"task: the prompt of problem {problem.id} has {len(ids)} tokens; with "
                    f"sampling.max_tokens ({max_tokens}) that is more than the model's context ({context}); "
                    "shorten it or lower sampling.max_tokens"
                )
        return Checked(prompt_ids, longest(prompt_ids), max_tokens)

    def play(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        generation_params: GenerationParams,
        rng_key: RngKey,
    ) -> Episodes:
        with self._one_at_a_time:
            prompts = [self._prompt(problem) for problem in problems]
        rollouts = complete(sampler, prompts, generation_params, rng_key)
        G = generation_params.num_generations
        with self._one_at_a_time:
            texts = self._tokenizer.grouped_texts([r.completion_ids for r in rollouts], G)
            with self._station("time/reward_s"):
                rewards = self.reward.values(problems, texts)
        return Episodes(list(problems), rollouts, texts, rewards, self.binary)

    def _prompt(self, problem: Problem) -> list[int]:
        key = problem.prompt, problem.system
        if key not in self._prompts:
            self._prompts[key] = self._tokenizer.encode(problem.prompt, self._chat, problem.system)
        return self._prompts[key]
