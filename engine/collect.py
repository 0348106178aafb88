"""The rollouts of a step: prompts in order, G samples each, and dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).

With loss.draws = D > 1 a step draws its P prompts up to D times, until in P groups the rewards differ; the step trains on those, in
the order drawn. Where D draws do not suffice, groups without difference, which have no gradient, fill the step up. The problems of
draw d of step s are at the places (s D + d) P .. of the order of problems, so no step depends on how many draws another one needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..kernels.philox import Stream, permutation
from .advantage import all_equal
from .config import Config
from .evaluate import group_texts
from .ranks import ALONE, Ranks
from .rollout import Keys, Rollout, Sampler, Sampling
from .tasks import Reward, rewards
from .tasks.base import Problem
from .text import Text


@dataclass(frozen=True)
class Collected:
    """What a step trains on; rollouts in canonical order. A rollout's `prompt` is its place among all that were drawn."""

    problems: list[Problem]
    rollouts: list[Rollout]
    texts: list[list[str]]  # [P][G]
    rewards: np.ndarray  # [P, G]
    drawn: int  # groups drawn


def collect(
    cfg: Config, step: int, sampler: Sampler, sampling: Sampling, text: Text, reward: Reward,
    problems: Sequence[Problem], prompt_ids: Sequence[Sequence[int]], ranks: Ranks = ALONE,
) -> Collected:  # fmt: skip
    """Sample and reward the prompts of a step; rank 0 rewards. Raises ValueError (see tasks.rewards)."""
    P, G, draws = cfg.prompts, sampling.samples, cfg.loss.resolve().draws
    groups, differ = [], []
    for draw in range(draws):
        chosen = step_problems(len(problems), P, cfg.seed, step * draws + draw)
        rollouts = sampler.generate([prompt_ids[i] for i in chosen], sampling, Keys(cfg.seed, step, first_prompt=draw * P))
        texts = group_texts(text, rollouts, G)
        r = ranks.from_first(partial(rewards, reward, [problems[i] for i in chosen], texts))
        for p, i in enumerate(chosen):
            groups.append((problems[i], rollouts[p * G : (p + 1) * G], texts[p], r[p]))
            if not all_equal(r[p].tolist()):
                differ.append(len(groups) - 1)
        if len(differ) >= P:
            break
    alike = sorted(set(range(len(groups))) - set(differ))
    kept = range(P) if draws == 1 else sorted([*differ[:P], *alike[: max(0, P - len(differ))]])
    own = [groups[i] for i in kept]
    every = [rollout for group in own for rollout in group[1]]
    return Collected([g[0] for g in own], every, [g[2] for g in own], np.stack([g[3] for g in own]), len(groups))


def step_problems(n: int, prompts: int, seed: int, step: int, stream: Stream = Stream.ORDER) -> list[int]:
    """The step's problems: the data set in a new random order each epoch, cut into steps without a remainder lost."""
    place = range(step * prompts, (step + 1) * prompts)
    orders = {epoch: permutation(n, seed, stream, epoch) for epoch in {p // n for p in place}}
    return [int(orders[p // n][p % n]) for p in place]
