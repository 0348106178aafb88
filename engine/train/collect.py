"""The rollouts of a step: prompts in order, G generations of each, and dynamic sampling.

Dynamic sampling is DAPO's (arXiv:2503.14476, section 3.2). With loss.max_resamples = D > 1 a step draws P
prompts up to D times, until the rewards differ within P groups. The step trains on these groups, in the order
drawn. Where D draws are not enough, groups with equal rewards fill the step up; they have no gradient.

The order of problems has P places for each draw. Those of draw d of step s begin at place (s D + d) P. So no
step depends on how many draws another step needed.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from ...kernels.philox import Stream, permutation
from ..rollout.episodes import Episodes, joined
from ..rollout.types import RngKey, Sampler
from ..tasks.base import Problem
from .losses.advantage import all_equal
from .state import TrainState


@dataclass(frozen=True)
class RolloutBatch(Episodes):
    """The episodes of a step, P prompts x G generations.

    The `prompt` of a rollout is the place of its prompt among all prompts that the step drew.
    """

    groups_drawn: int = 0
    # For each group the class of each completion that is trained on; completions of one class mean the same.
    # None where the loss does not ask.
    classes: list[list[int]] | None = None


def collect(state: TrainState) -> RolloutBatch:
    """The episodes of the next step; played now, or before, where a pool of actors draws (ahead.py).

    Raises what collect_step raises.
    """
    if state.ahead is not None:
        return state.ahead.take(state.step, partial(collect_step, state))
    return collect_step(state, state.step, state.sampler)


def collect_step(
    state: TrainState, step: int, sampler: Sampler, rng_key: RngKey | None = None
) -> RolloutBatch:
    """Play the episodes of step number `step`; rank 0 computes the rewards.

    It reads nothing of the state that a step changes, so the trainer may take other steps meanwhile. rng_key:
    of the first prompt; None is the step's own.

    Raises ValueError (see Reward.values and Equivalence.classes), and where every trajectory ended in an
    error.
    """
    P, max_resamples = state.config.prompts, state.config.loss.max_resamples
    rng_key = rng_key or RngKey(state.config.seed, step)
    groups: list[Episodes] = []
    for draw in range(max_resamples):
        episodes = _play(state, step, sampler, draw, replace(rng_key, prompt=draw * P))
        groups += [episodes.group(p) for p in range(P)]
        if sum(not _all_equal(group) for group in groups) >= P:
            break
    chosen = joined(groups if max_resamples == 1 else _choose(groups, P))
    if not chosen.trained.any():
        error = next(filter(None, chosen.errors or []), "nothing was drawn")
        raise ValueError(f"environment: no trajectory of step {step} can be trained on; {error}")
    return RolloutBatch(**vars(chosen), groups_drawn=len(groups), classes=_classes(state, chosen))


def _classes(state: TrainState, episodes: Episodes) -> list[list[int]] | None:
    if state.equivalence is None:
        return None
    pairs = zip(episodes.texts, episodes.trained, strict=True)
    texts = [[t for t, is_kept in zip(*pair, strict=True) if is_kept] for pair in pairs]
    beside = state.ahead is not None  # what runs beside the trainer is no station of its step
    with nullcontext() if beside else state.stopwatch.station("time/reward_s"):
        return state.equivalence.classes(episodes.problems, texts)


def _play(state: TrainState, step: int, sampler: Sampler, draw: int, rng_key: RngKey) -> Episodes:
    """The P groups of draw number `draw` of a step. rng_key: of the first of them."""
    return state.player.play(sampler, drawn_problems(state, step, draw), state.generation_params, rng_key)


def drawn_problems(state: TrainState, step: int, draw: int) -> list[Problem]:
    """The problems of draw number `draw` of a step."""
    cfg = state.config
    n = cfg.prompts // state.player.players
    draws_before = step * cfg.loss.max_resamples + draw
    chosen = step_problems(len(state.problems), n, cfg.seed, draws_before)
    return [state.problems[i] for i in chosen]


def _choose(groups: Sequence[Episodes], P: int) -> list[Episodes]:
    """P groups, in the order drawn: the first groups whose rewards differ, then the first others."""
    differ = [i for i, group in enumerate(groups) if not _all_equal(group)]
    alike = [i for i, group in enumerate(groups) if _all_equal(group)]
    chosen = sorted([*differ[:P], *alike[: max(0, P - len(differ))]])
    return [groups[i] for i in chosen]


def _all_equal(group: Episodes) -> bool:
    return all_equal(group.rewards[group.trained].tolist())


def step_problems(n: int, prompts: int, seed: int, step: int, stream: Stream = Stream.ORDER) -> list[int]:
    """The indices of the problems of step number `step`, among n problems.

    Each epoch goes through all n problems in a new random order. The epochs follow each other without a gap,
    and each step takes the next `prompts` places of this sequence. So an epoch leaves no problem out at its
    end.
    """
    places = range(step * prompts, (step + 1) * prompts)
    orders = {epoch: permutation(n, seed, stream, epoch) for epoch in {place // n for place in places}}
    return [int(orders[place // n][place % n]) for place in places]
