"""A sampler over ranks: a trajectory comes back to the rank that has its keys and values."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import DrawParams, Request, RngKey, Sampler
from zerokl.engine.train.parallel.data_parallel import RankedSampler
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams

PARAMS = DrawParams(SamplingParams(), frozenset())


class Rank:
    """One of several ranks, each a thread of this process."""

    def __init__(self, rank: int, barrier: Barrier, shared: list[list[torch.Tensor]]):
        self.rank, self.size = rank, len(shared)
        self._barrier, self._shared = barrier, shared

    def gather_tensors(self, make: Callable[[], Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The tensors that make() returns in every rank, in the order of the ranks."""
        self._shared[self.rank] = list(make())
        self._barrier.wait()
        gathered = list(self._shared)
        self._barrier.wait()
        return gathered


def in_two_turns(sampler: Sampler, prompts: int) -> list[tuple[tuple[int, ...], bytes]]:
    """What two trajectories of each prompt of 40 ids draw in two turns, the second one in reverse order."""
    requests = [
        Request((20 + p,) * 40, RngKey(1, 2, prompt=p, sample=g), PARAMS, 9, 0, 100)
        for p in range(prompts)
        for g in range(2)
    ]
    first = sampler.generate(requests)
    later = [
        replace(request, ids=(*request.ids, *c.ids, 11), drawn=len(c.ids))
        for request, c in zip(requests, first, strict=True)
    ][::-1]
    return [(c.ids, c.logprobs.tobytes()) for c in (*first, *sampler.generate(later))]


@pytest.mark.parametrize(("prompts", "moved"), [(4, 0), (3, 1)])
def test_trajectories_come_back_to_their_rank(decoder, prompts, moved):
    """Of three prompts one rank has two. So it has 4 of 6 trajectories, and an even cut gives it 3."""
    barrier, shared = Barrier(2, timeout=60), [[], []]
    samplers = [NativeSampler(decoder) for _ in range(2)]
    ranks = [RankedSampler(sampler, Rank(i, barrier, shared)) for i, sampler in enumerate(samplers)]
    with ThreadPoolExecutor(2) as threads:
        drawn = list(threads.map(lambda rank: in_two_turns(rank, prompts), ranks))
    assert drawn[0] == drawn[1] == in_two_turns(NativeSampler(decoder), prompts)
    assert sum(sampler.tokens_cached for sampler in samplers) == (2 * prompts - moved) * KEY_TILE
