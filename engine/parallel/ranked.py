"""Workers, sampler and scorer of one rank among several:

each does its own part, and every rank gets what all of them did.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.decoder import Decoder
from ..rollout.types import GenerationParams, RngKey, Rollout, Sampler
from .gradient import GradientTree
from .partition import virtual_shards
from .ranks import Ranks
from .scorer import Scorer
from .workers import Workers
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


def shards_at_once(virtual_shards: int, ranks: int, workers: int) -> int:
    """Virtual shards of a rank that its workers sum before the ranks' sums meet:

    all of them alone, one a worker among others.
    """
    each = virtual_shards // ranks
    return each if ranks == 1 else 1 << (min(workers, each).bit_length() - 1)


class RankedWorkers:
    """The workers of one rank, for a step's shards over all ranks. The interface of Workers, as far as
    training needs it.

    The shards are done in rounds, of neighbours in every round: the owner of a slice then needs the tree over
    the rounds of that slice only, and no rank a tree of whole gradients.
    """

    def __init__(self, workers: Workers, slices: Slices, virtual_shards: int):
        self._workers, self._slices = workers, slices
        self._round = workers.shards * slices.ranks.size
        self._tree = GradientTree(virtual_shards // self._round)

    @property
    def n(self) -> int:
        """Workers of this rank."""
        return self._workers.n

    def own_threads(self) -> AbstractContextManager[None]:
        """See Workers.own_threads."""
        return self._workers.own_threads()

    def sum_shards(
        self, work: Callable[[Decoder, X], Y], shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """See Workers.sum_shards:

        the same results in every rank, and of the gradient its part (Slices.sum_roots).
        """
        results: list[Y | None] = []
        for first in range(0, len(shards), self._round):
            every, gradient = self._sum_round(work, shards[first : first + self._round])
            results += every
            self._tree.push(gradient)
        return results, self._tree.take()

    def _sum_round(
        self, work: Callable[[Decoder, X], Y], shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        ranks, each = self._slices.ranks, self._workers.shards
        root: torch.Tensor | None = None

        def own() -> tuple[list[Y | None], bool]:
            nonlocal root
            done, root = self._workers.sum_shards(work, shards[ranks.rank * each : (ranks.rank + 1) * each])
            return done, root is not None

        every = ranks.gather(own)
        gradient = self._slices.sum_roots(root, [has for _, has in every])
        return [result for done, _ in every for result in done], gradient

    def close(self) -> None:
        """End this rank's other processes."""
        self._workers.close()


class RankedSampler:
    """A sampler whose prompts are spread over the ranks; every rank gets all rollouts."""

    def __init__(self, sampler: Sampler, ranks: Ranks):
        self._sampler, self._ranks = sampler, ranks

    def sync_weights(self, version: int) -> None:
        """See Sampler."""
        self._sampler.sync_weights(version)

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """See Sampler."""
        parts = virtual_shards(prompts, self._ranks.size)
        mine = parts[self._ranks.rank]
        before = rng_key.first_prompt + sum(map(len, parts[: self._ranks.rank]))

        def own() -> list[Rollout]:
            return (
                self._sampler.generate(mine, generation_params, replace(rng_key, first_prompt=before))
                if len(mine)
                else []
            )

        return [rollout for part in self._ranks.gather(own) for rollout in part]

    def close(self) -> None:
        """See Sampler."""
        self._sampler.close()


class RankedScorer:
    """A Scorer whose rollouts are spread over the ranks; every rank gets all scores."""

    def __init__(self, scorer: Scorer, ranks: Ranks):
        self._scorer, self._ranks, self.decoder = scorer, ranks, scorer.decoder

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """See Scorer."""
        mine = virtual_shards(rollouts, self._ranks.size)[self._ranks.rank]
        every = self._ranks.gather(lambda: self._scorer.score(mine, sampling_params) if len(mine) else [])
        return [logp for part in every for logp in part]

    def close(self) -> None:
        """See Scorer."""
        self._scorer.close()
