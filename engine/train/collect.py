"""The rollouts of a step: prompts in order, G generations each, and dynamic sampling (DAPO, arXiv:2503.14476,
section 3.2).

With loss.max_resamples = D > 1 a step draws its P prompts up to D times, until the rewards differ in P
groups. The step trains on those groups, in the order drawn. Where D draws do not suffice, groups without a
difference, which have no gradient, fill the step up. The problems of draw d of step s are at the places (s D
+ d) P and following of the order of problems, so no step depends on how many draws another step needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...kernels.philox import Stream, permutation
from ..loss.advantage import all_equal
from ..rollout.evaluate import group_texts
from ..rollout.types import RngKey, Rollout
from ..tasks import rewards
from ..tasks.base import Problem
from .state import TrainState


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on; rollouts in canonical order.

    A rollout's `prompt` is its place among all that were drawn.
    """

    problems: list[Problem]  # [P]
    rollouts: list[Rollout]  # [P G]
    texts: list[list[str]]  # [P][G]
    rewards: np.ndarray  # [P, G]
    groups_drawn: int


@dataclass(frozen=True)
class _Group:
    """The G generations of one prompt, with texts and rewards [G]."""

    problem: Problem
    rollouts: list[Rollout]
    texts: list[str]
    rewards: np.ndarray


def collect(state: TrainState) -> RolloutBatch:
    """Sample and reward the prompts of the next step of a TrainState; rank 0 rewards.

    Raises ValueError (see tasks.rewards).
    """
    P, max_resamples = state.config.prompts, state.config.loss.resolve().max_resamples
    groups: list[_Group] = []
    for draw in range(max_resamples):
        groups += _draw_groups(state, draw)
        if sum(not all_equal(group.rewards.tolist()) for group in groups) >= P:
            break
    kept = groups if max_resamples == 1 else _choose(groups, P)
    return RolloutBatch(
        [group.problem for group in kept],
        [rollout for group in kept for rollout in group.rollouts],
        [group.texts for group in kept],
        np.stack([group.rewards for group in kept]),
        len(groups),
    )


def _draw_groups(state: TrainState, draw: int) -> list[_Group]:
    """P groups of the step's draw number `draw`."""
    cfg, params = state.config, state.generation_params
    P, G = cfg.prompts, params.num_generations
    place = state.step * cfg.loss.resolve().max_resamples + draw
    chosen = step_problems(len(state.problems), P, cfg.seed, place)
    problems = [state.problems[i] for i in chosen]
    rng_key = RngKey(cfg.seed, state.step, first_prompt=draw * P)
    rollouts = state.sampler.generate([state.prompt_ids[i] for i in chosen], params, rng_key)
    texts = group_texts(state.tokenizer, rollouts, G)
    table = state.ranks.from_first(partial(rewards, state.reward, problems, texts))
    return [
        _Group(problem, rollouts[p * G : (p + 1) * G], texts[p], table[p])
        for p, problem in enumerate(problems)
    ]


def _choose(groups: Sequence[_Group], P: int) -> list[_Group]:
    """P groups in the order drawn: the first whose rewards differ, then the first of the others."""
    differ = [i for i, group in enumerate(groups) if not all_equal(group.rewards.tolist())]
    alike = [i for i, group in enumerate(groups) if all_equal(group.rewards.tolist())]
    chosen = sorted([*differ[:P], *alike[: max(0, P - len(differ))]])
    return [groups[i] for i in chosen]


def step_problems(n: int, prompts: int, seed: int, step: int, stream: Stream = Stream.ORDER) -> list[int]:
    """The step's problems:

    the data set in a new random order each epoch, cut into steps without a remainder lost.
    """
    places = range(step * prompts, (step + 1) * prompts)
    orders = {epoch: permutation(n, seed, stream, epoch) for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]
