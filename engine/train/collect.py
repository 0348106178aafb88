"""The rollouts of a step: prompts in order, G generations of each, and dynamic sampling.

Dynamic sampling is DAPO's (arXiv:2503.14476, section 3.2). With loss.max_resamples = D > 1 a step draws P
prompts up to D times, until the rewards differ within P groups. The step trains on these groups, in the order
drawn. Where D draws are not enough, groups with equal rewards fill the step up; they have no gradient.

The order of problems has P places for each draw. Those of draw d of step s begin at place (s D + d) P. So no
step depends on how many draws another step needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.philox import Stream, permutation
from ..loss.advantage import all_equal
from ..rollout.evaluate import group_texts
from ..rollout.types import RngKey, Rollout, complete
from ..tasks.base import Problem
from .state import TrainState


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on; rollouts in canonical order.

    The `prompt` of a rollout is the place of its prompt among all prompts that the step drew.
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
    """Sample and reward the prompts of the next step; rank 0 computes the rewards.

    Raises ValueError (see Reward.values).
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
    """The P groups of draw number `draw` of the step."""
    cfg, params = state.config, state.generation_params
    P, G = cfg.prompts, params.num_generations
    draws_before = state.step * cfg.loss.resolve().max_resamples + draw
    chosen = step_problems(len(state.problems), P, cfg.seed, draws_before)
    problems = [state.problems[i] for i in chosen]
    rng_key = RngKey(cfg.seed, state.step, prompt=draw * P)
    rollouts = complete(state.sampler, [state.prompt_ids[i] for i in chosen], params, rng_key)
    texts = group_texts(state.tokenizer, rollouts, G)
    with state.stopwatch.station("time/reward_s"):
        rewards_PG = state.reward.values(problems, texts)
    return [
        _Group(problem, rollouts[p * G : (p + 1) * G], texts[p], rewards_PG[p])
        for p, problem in enumerate(problems)
    ]


def _choose(groups: Sequence[_Group], P: int) -> list[_Group]:
    """P groups, in the order drawn: the first groups whose rewards differ, then the first others."""
    differ = [i for i, group in enumerate(groups) if not all_equal(group.rewards.tolist())]
    alike = [i for i, group in enumerate(groups) if all_equal(group.rewards.tolist())]
    chosen = sorted([*differ[:P], *alike[: max(0, P - len(differ))]])
    return [groups[i] for i in chosen]


def step_problems(n: int, prompts: int, seed: int, step: int, stream: Stream = Stream.ORDER) -> list[int]:
    """The indices of the problems of step number `step`, among n problems.

    Each epoch goes through all n problems in a new random order. The epochs follow each other without a gap,
    and each step takes the next `prompts` places of this sequence. So an epoch leaves no problem out at its
    end.
    """
    places = range(step * prompts, (step + 1) * prompts)
    orders = {epoch: permutation(n, seed, stream, epoch) for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]
