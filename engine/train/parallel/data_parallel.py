"""Workers, sampler, scorer, reward, equivalence and environments of one rank among several.

Each rank does its own part of the work, and every rank gets the results of all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ...rollout.types import Completion, Request, Rollout, Sampler
from ...tasks.environments import Answer, Environments, Failure, Game
from ...tasks.equivalence import Equivalence
from ...tasks.problem import Problem
from ...tasks.rewards import Reward
from .exchange import pack_completions, pack_scores, unpack_completions, unpack_scores
from .gathered import WholeWeights
from .gradient import GradientTree, OnePassWork, ShardsWork
from .partition import RequestParts, in_order, virtual_shards
from .process_group import Ranks
from .scorer import Scorer
from .workers import Workers
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


class RankedWorkers(ABC):
    """The workers of one rank, for the shards of a step over all ranks.

    It has the interface of Workers, as far as training needs it. The shards are computed in rounds, and the
    shards of a round are neighbours. In a round the ranks exchange their gradients once. Each rank keeps a
    tree over the rounds, for its part of the gradient only.
    """

    n = 1  # workers of this rank

    def __init__(self, shards_of_round: int, virtual_shards: int):
        self._round = shards_of_round
        self._tree = GradientTree(virtual_shards // shards_of_round)

    def own_threads(self) -> AbstractContextManager[None]:
        """A single worker has all threads."""
        return nullcontext()

    def sum_shards(
        self, work: ShardsWork | OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """Every rank gets the same results, and its own part of the gradient (Slices.sum_roots)."""
        results: list[Y | None] = []
        for first in range(0, len(shards), self._round):
            round_results, gradient = self._sum_round(work, shards[first : first + self._round])
            results += round_results
            self._tree.push(gradient)
        return results, self._slice_of(self._tree.take())

    @abstractmethod
    def _sum_round(
        self, work: ShardsWork | OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """The results of all ranks, and this rank's part of the gradients' sum; None where there is none."""

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        """The rank's slice of the gradient, of the tree's root."""
        return root

    def close(self) -> None:  # noqa: B027, a rank without other processes has nothing to end
        """End this rank's other processes."""


class ReplicatedWorkers(RankedWorkers):
    """RankedWorkers over whole weights. In a round each rank adds up `workers.shards` neighbours."""

    def __init__(self, workers: Workers, slices: Slices, virtual_shards: int):
        super().__init__(workers.shards * slices.ranks.size, virtual_shards)
        self._workers, self._slices, self.n = workers, slices, workers.n

    def own_threads(self) -> AbstractContextManager[None]:
        return self._workers.own_threads()

    def _sum_round(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        ranks, n = self._slices.ranks, self._workers.shards
        root: torch.Tensor | None = None

        def sum_shards_of_this_rank() -> tuple[list[Y | None], bool]:
            nonlocal root
            results, root = self._workers.sum_shards(work, shards[ranks.rank * n : (ranks.rank + 1) * n])
            return results, root is not None

        outcomes = ranks.gather(sum_shards_of_this_rank)
        gradient = self._slices.sum_roots(root, [has_root for _, has_root in outcomes])
        return [result for results, _ in outcomes for result in results], gradient

    def close(self) -> None:
        self._workers.close()


class _Scoring:
    """Scores of rollouts that are spread over the ranks; every rank gets all.

    whole: the weights, where they are spread too, and whole inside a call only.
    """

    def __init__(self, ranks: Ranks, whole: WholeWeights | None):
        self._ranks, self._whole = ranks, whole
        self._gathered = whole.gathered if whole else nullcontext

    def _all_scores(
        self, rollouts: Sequence[Rollout], score: Callable[[Sequence[Rollout]], list[np.ndarray]]
    ) -> list[np.ndarray]:
        """The scores [C] of all rollouts, of which each rank computes a part."""
        own_rollouts = virtual_shards(rollouts, self._ranks.size)[self._ranks.rank]

        def scores() -> list[torch.Tensor]:
            with self._gathered():
                return pack_scores(score(own_rollouts))

        return [x for tensors in self._ranks.gather_tensors(scores) for x in unpack_scores(tensors)]


class RankedSampler(_Scoring):
    """A sampler whose prompts are spread over the ranks; every rank gets all rollouts. See _Scoring."""

    def __init__(self, sampler: Sampler, ranks: Ranks, whole: WholeWeights | None = None):
        super().__init__(ranks, whole)
        self._sampler, self._parts = sampler, RequestParts(ranks.size)

    @property
    def samples_at_once(self) -> int | None:
        """The samples that this rank draws at once."""
        return self._sampler.samples_at_once

    def sync_weights(self, version: int) -> None:
        self._parts.forget()
        self._sampler.sync_weights(version)

    def end_turns(self) -> None:
        self._parts.forget()
        self._sampler.end_turns()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        parts = self._parts.cut(requests)  # the same in every rank
        own_requests = [requests[i] for i in parts[self._ranks.rank]]

        def completions() -> list[torch.Tensor]:
            with self._gathered():
                return pack_completions(self._sampler.generate(own_requests))

        all_completions = map(unpack_completions, self._ranks.gather_tensors(completions))
        return in_order(parts, list(all_completions))

    @property
    def version(self) -> int:
        return self._sampler.version

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return self._all_scores(rollouts, partial(self._sampler.score, sampling_params=sampling_params))

    def close(self) -> None:
        self._sampler.close()


class RankedScorer(_Scoring):
    """A Scorer whose rollouts are spread over the ranks; every rank gets all scores. See _Scoring."""

    def __init__(self, scorer: Scorer, ranks: Ranks, whole: WholeWeights | None = None):
        super().__init__(ranks, whole)
        self._scorer, self.decoder = scorer, scorer.decoder

    def fingerprint(self) -> str:
        """All ranks call this together."""
        return (self._whole or self._scorer).fingerprint()

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return self._all_scores(rollouts, partial(self._scorer.score, sampling_params=sampling_params))

    def values(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return self._all_scores(rollouts, self._scorer.values)

    def close(self) -> None:
        self._scorer.close()


class _OfFirst(Generic[X]):
    """What rank 0 alone has; every rank gets its answers."""

    def __init__(self, opened: Callable[[], X], ranks: Ranks):
        """opened: makes it, in rank 0. Raises in every rank what it raises there."""
        self._ranks = ranks
        self._made: list[X] = []
        ranks.from_first(lambda: self._made.append(opened()))

    def _ask(self, question: Callable[[X], Y]) -> Y:
        """The answer of rank 0. All ranks ask together."""
        return self._ranks.from_first(lambda: question(*self._made))


class RankedReward(_OfFirst[Reward]):
    """A reward that rank 0 computes; every rank gets the values."""

    def __init__(self, opened: Callable[[], Reward], ranks: Ranks):
        super().__init__(opened, ranks)
        self.binary = self._ask(lambda reward: reward.binary)

    def values(self, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> np.ndarray:
        return self._ask(lambda reward: reward.values(problems, completions))

    def check_answers(self, problems: Sequence[Problem]) -> None:
        self._ask(lambda reward: reward.check_answers(problems))


class RankedEquivalence(_OfFirst[Equivalence]):
    """Classes of completions that rank 0 forms; every rank gets them."""

    def classes(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[list[int]]:
        return self._ask(lambda equivalence: equivalence.classes(problems, groups))


class RankedEnvironments(_OfFirst[Environments]):
    """Environments that rank 0 plays; every rank gets their answers."""

    def __init__(self, opened: Callable[[], Environments], ranks: Ranks):
        super().__init__(opened, ranks)
        self.about = self._ask(lambda environments: environments.about)
        self._games: list[Game] = []  # those that were asked since nobody waited for an answer
        self._waiting = 0

    def ask(self, game: Game) -> None:
        """All ranks ask for the same games in the same order."""
        if not self._waiting:
            self._games = []
        self._games.append(game)
        self._waiting += 1
        for environments in self._made:
            environments.ask(game)

    def answers(self, wait: bool) -> list[tuple[Game, Answer | Failure]]:
        """They are the same in every rank."""

        def answers_here(environments: Environments) -> list[tuple[int, Answer | Failure]]:
            places = {id(game): place for place, game in enumerate(self._games)}
            return [(places[id(game)], answer) for game, answer in environments.answers(wait)]

        answers = self._ask(answers_here)
        self._waiting -= len(answers)
        return [(self._games[place], answer) for place, answer in answers]

    def close_games(self) -> None:
        self._ask(lambda environments: environments.close_games())
