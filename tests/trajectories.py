"""Trajectories of three turns, drawn by any sampler: a stand-in for an environment."""

from collections.abc import Sequence
from dataclasses import replace

from zerokl.engine.rollout.types import (
    Completion,
    GenerationParams,
    Request,
    RngKey,
    Rollout,
    Sampler,
    serve_in_waves,
)

# What stands before the second and the third turn.
BETWEEN = ((11, 12, 13), (14,))


class _ThreeTurns:
    """A RequestSource. Each completion goes on twice, after ids that nobody drew.

    The sampler has to ask several times before a turn is ready, for some trajectories more often than for
    others.
    """

    def __init__(self, requests: Sequence[Request]):
        self.requests, self.rollouts = list(requests), [None] * len(requests)
        self.waiting = dict.fromkeys(range(len(requests)), 0)

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        ready = []
        while True:
            ready += [place for place, wait in self.waiting.items() if not wait]
            self.waiting = {place: wait - 1 for place, wait in self.waiting.items() if wait}
            if len(ready) >= at_least or not self.waiting:
                return [(place, self.requests[place]) for place in ready]

    def completed(self, place: int, completion: Completion) -> None:
        request, before = self.requests[place], self.rollouts[place]
        if before is None:
            key, c = request.rng_key, completion
            rollout = Rollout.of_one_turn(
                key.prompt, key.sample, request.ids, c.ids, c.logprobs, c.finish, c.weight_version, c.experts
            )
        else:
            rollout = before.with_turn(request.ids[len(before.ids) :], completion).check()
        self.rollouts[place] = rollout
        if rollout.turns < 3:
            ids, drawn = (*rollout.ids, *BETWEEN[rollout.turns - 1]), len(rollout.logprobs)
            total = request.trajectory_tokens if rollout.turns < 2 else 0
            self.requests[place] = replace(request, ids=ids, drawn=drawn, trajectory_tokens=total)
            self.waiting[place] = place % 7


def in_three_turns(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    generation_params: GenerationParams,
    rng_key: RngKey,
    at_any_time: bool = False,
) -> list[Rollout]:
    """As `complete`, but each completion goes on twice, after ids that nobody drew.

    at_any_time: a turn is drawn as soon as it is ready, beside earlier turns of others.
    """
    requests = generation_params.requests(prompts, rng_key)
    most = 3 * generation_params.max_tokens + sum(map(len, BETWEEN))
    source = _ThreeTurns([replace(r, trajectory_tokens=len(r.ids) + most) for r in requests])
    if at_any_time:
        sampler.serve(source)
    else:
        serve_in_waves(sampler, source)
    sampler.end_turns()
    return source.rollouts
