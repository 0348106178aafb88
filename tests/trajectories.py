"""Trajectories of three turns, drawn by any sampler: a stand-in for an environment."""

from collections.abc import Sequence
from dataclasses import replace

from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, Sampler

# What stands before the second and the third turn.
BETWEEN = ((11, 12, 13), (14,))


def in_three_turns(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    generation_params: GenerationParams,
    rng_key: RngKey,
) -> list[Rollout]:
    """As `complete`, but each completion goes on twice, after ids that nobody drew."""
    requests = generation_params.requests(prompts, rng_key)
    most = 3 * generation_params.max_tokens + sum(map(len, BETWEEN))
    going_on = [replace(request, trajectory_tokens=len(request.ids) + most) for request in requests]
    rollouts = [
        Rollout.of_one_turn(
            request.rng_key.prompt,
            request.rng_key.sample,
            request.ids,
            c.ids,
            c.logprobs,
            c.finish,
            c.weight_version,
        )
        for request, c in zip(requests, sampler.generate(going_on), strict=True)
    ]
    for between, turn in zip(BETWEEN, (going_on, requests), strict=True):
        continued = [
            replace(request, ids=(*r.ids, *between), drawn=len(r.logprobs))
            for r, request in zip(rollouts, turn, strict=True)
        ]
        completions = sampler.generate(continued)
        rollouts = [r.with_turn(between, c).check() for r, c in zip(rollouts, completions, strict=True)]
    sampler.end_turns()
    return rollouts
