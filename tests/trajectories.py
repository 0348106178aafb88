"""Trajectories of three turns, drawn by any sampler: a stand-in for an environment."""

from collections.abc import Sequence
from dataclasses import replace

from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, Sampler, complete

# What stands before the second and the third turn.
BETWEEN = ((11, 12, 13), (14,))


def in_three_turns(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    generation_params: GenerationParams,
    rng_key: RngKey,
) -> list[Rollout]:
    """As `complete`, but each completion goes on twice, after ids that nobody drew."""
    rollouts = complete(sampler, prompts, generation_params, rng_key)
    requests = generation_params.requests(prompts, rng_key)
    for between in BETWEEN:
        continued = [
            replace(request, ids=(*r.ids, *between), drawn=len(r.logprobs))
            for r, request in zip(rollouts, requests, strict=True)
        ]
        completions = sampler.generate(continued)
        rollouts = [r.with_turn(between, c).check() for r, c in zip(rollouts, completions, strict=True)]
    return rollouts
