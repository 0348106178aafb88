"""What follows from the tokens of a logged step on any machine: prompts, ends, rewards and advantages.

The player of a run plays each step again, over a sampler that draws what was logged. So whoever writes other
rewards into a run must write tokens that earn them.
"""

from collections.abc import Sequence

import numpy as np

from ....files.reading import shown
from ....kernels.sampling_params import SamplingParams
from ....verify.difference import Difference, first_wrong
from ...config.run_config import Config
from ...rollout.episodes import Episodes
from ...rollout.scoring_sampler import ScoringSampler
from ...rollout.types import Completion, Request, RngKey, Rollout
from ...tasks.base import Problem
from ...tasks.environment import VOID
from ...train.collect import drawn_problems
from ...train.losses.reward_shaping import shaped_rewards
from ...train.prepare import reward_advantages
from ...train.state import TrainState
from .logged_steps import LoggedStep


class RecordedSampler(ScoringSampler):
    """Draws the tokens of a step's logged rollouts.

    Raises ValueError for a request that continues other ids than those that were logged.
    """

    version = 0

    def __init__(self, rollouts: Sequence[Rollout]):
        self._rollouts = {(r.prompt, r.sample): r for r in rollouts}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The logged turn that each request asks for."""
        return [self._completion(request) for request in requests]

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """The logged log-probabilities."""
        return [self._rollouts[r.prompt, r.sample].logprobs[-len(r.logprobs) :] for r in rollouts]

    def sync_weights(self, version: int) -> None:
        """Do nothing: no weights draw."""

    def _completion(self, request: Request) -> Completion:
        """The logged turn that begins where the request ends."""
        key, start = request.rng_key, len(request.ids)
        rollout = self._rollouts[key.prompt, key.sample]
        stop_ids = request.draw_params.stop_ids
        if start not in rollout.turn_starts or rollout.ids[:start] != request.ids:
            if rollout.finish in VOID:  # nothing of it counts; its environment failed in its own time
                return Completion((min(stop_ids),), np.zeros(1, np.float32), "stop", self.version)
            raise ValueError(
                f"prompt {key.prompt}, sample {key.sample}: the ids before turn {_turns(rollout, start)} are "
                "not those of its problem"
            )
        ends = [*rollout.turn_starts, len(rollout.ids)]
        stop = ends[ends.index(start) + 1]
        end = start + int(rollout.drawn[start:stop].sum())
        before = int(rollout.drawn[:start].sum())
        ids, logprobs = rollout.ids[start:end], rollout.logprobs[before : before + end - start]
        return Completion(ids, logprobs, "stop" if ids[-1] in stop_ids else "length", self.version)


def _turns(rollout: Rollout, start: int) -> int:
    """The number of a rollout's turns before a place of its ids."""
    return sum(place < start for place in rollout.turn_starts)


def derives_rewards(state: TrainState) -> bool:
    """Whether rewards follow from tokens: not where the probability of an answer is the reward."""
    return _can_be_played(state) and state.player.rewards_by_tokens


def _can_be_played(state: TrainState) -> bool:
    """Whether the keys of a step's trajectories are known: not where dynamic sampling left out some."""
    return state.config.loss.max_resamples == 1 or not state.player.plays_by_place


def derives_advantages(config: Config) -> bool:
    """Whether advantages follow from the rewards by sums and quotients alone."""
    loss = config.loss
    by_numbers = loss.advantage in ("gae", "dpo", "verifree") or bool(loss.semantic_entropy)
    return not by_numbers and not (loss.kl_coef and loss.kl_in == "reward")


def derived_fault(step: int, logged: LoggedStep, state: TrainState) -> str | None:
    """The first prompt, end, reward or advantage that does not follow from the tokens; None if all do."""
    if _can_be_played(state):
        try:
            problems = _problems(step, logged, state)
            params, key = state.generation_params, RngKey(state.config.seed, step)
            played = state.player.play(RecordedSampler(logged.rollouts), problems, params, key)
        except ValueError as error:
            return str(error)
        if fault := _played_fault(logged, played, derives_rewards(state)):
            return fault
    return _advantages_fault(logged, state) if derives_advantages(state.config) else None


def _problems(step: int, logged: LoggedStep, state: TrainState) -> list[Problem]:
    """The problems of a step, in its order. Of several draws, those that the log names.

    Raises ValueError where the step did not draw one that the log names.
    """
    draws = state.config.loss.max_resamples
    drawn = [problem for draw in range(draws) for problem in drawn_problems(state, step, draw)]
    if draws == 1:
        return drawn
    left, chosen = iter(drawn), []
    for line in logged.lines[:: len(logged.lines) // state.config.prompts]:
        problem = next((p for p in left if p.id == line.get("problem")), None)
        if problem is None:
            raise ValueError(f"the step draws no problem {shown(line.get('problem'))} where the log has it")
        chosen.append(problem)
    return chosen


def _played_fault(logged: LoggedStep, played: Episodes, with_rewards: bool) -> str | None:
    """What of the log is not what its tokens give. played: with these tokens."""
    G = played.rewards.shape[1]
    for i, (line, was, now) in enumerate(zip(logged.lines, logged.rollouts, played.rollouts, strict=True)):
        if was.finish in VOID:
            continue
        p, g = divmod(i, G)
        stored = {
            "problem": line.get("problem"),
            "prompt_text": line.get("prompt_text"),
            "completion_ids": was.ids,
            "turn_starts": was.turn_starts,
        }
        problem = played.problems[p]
        derived = dict(zip(stored, (problem.id, problem.prompt, now.ids, now.turn_starts), strict=True))
        if with_rewards:
            stored["reward"], derived["reward"] = (float(x.rewards[p, g]) for x in (logged.episodes, played))
        if played.turn_rewards is not None:
            stored |= {"finish": was.finish, "turn_rewards": line["turn_rewards"]}
            derived |= {"finish": now.finish, "turn_rewards": played.turn_rewards[i]}
        if wrong := first_wrong(stored, derived):
            return f"prompt {p}, sample {g}: {wrong.beside('its problem and tokens give')}"
    return None


def _advantages_fault(logged: LoggedStep, state: TrainState) -> str | None:
    """The first advantage that does not follow from the rewards."""
    loss, episodes = state.config.loss, logged.episodes
    shaped = shaped_rewards(episodes.rewards, episodes.lengths, loss, state.max_tokens, episodes.trained)
    derived = reward_advantages(loss, episodes, shaped)
    G = episodes.rewards.shape[1]
    was, now = logged.advantages.rows, derived.rows
    if len(was) != len(now):
        return "there is not one advantage where the loss has one"
    for i, (x, y) in enumerate(zip(was, now, strict=True)):
        if x.tobytes() != y.tobytes():
            p, g = divmod(i, G)
            sides = (A.tolist()[0] if len(A) == 1 else A.tolist() for A in (x, y))
            wrong = Difference("advantage", tuple(sides))
            return f"prompt {p}, sample {g}: {wrong.beside('the rewards give')}"
    return None
