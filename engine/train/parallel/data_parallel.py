"""Workers, sampler, scorer, reward, equivalence and environments of one rank among several.

Each rank does its own part of the work, and every rank gets the results of all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ...rollout.types import Completion, Request, Rollout, Sampler
from ...tasks.environments import AboutEnvironments, Answer, Environments, Failure, Game
from ...tasks.equivalence import Equivalence
from ...tasks.problem import Problem
from ...tasks.rewards import Reward
from .exchange import pack_completions, pack_scores, unpack_completions, unpack_scores
from .gathered import GatheredScorer
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


class RankedSampler:
    """A sampler whose prompts are spread over the ranks; every rank gets all rollouts."""

    def __init__(self, sampler: Sampler, ranks: Ranks):
        self._sampler, self._ranks, self._parts = sampler, ranks, RequestParts(ranks.size)

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
        gathered = self._ranks.gather_tensors(lambda: pack_completions(self._sampler.generate(own_requests)))
        return in_order(parts, [unpack_completions(tensors) for tensors in gathered])

    @property
    def version(self) -> int:
        return self._sampler.version

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return _scores_of_all(lambda part: self._sampler.score(part, sampling_params), self._ranks, rollouts)

    def close(self) -> None:
        self._sampler.close()


class RankedScorer:
    """A Scorer whose rollouts are spread over the ranks; every rank gets all scores."""

    def __init__(self, scorer: Scorer | GatheredScorer, ranks: Ranks):
        self._scorer, self._ranks, self.decoder = scorer, ranks, scorer.decoder

    def fingerprint(self) -> str:
        """All ranks call this together."""
        return self._scorer.fingerprint()

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return _scores_of_all(lambda part: self._scorer.score(part, sampling_params), self._ranks, rollouts)

    def values(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return _scores_of_all(self._scorer.values, self._ranks, rollouts)

    def close(self) -> None:
        self._scorer.close()


def _scores_of_all(
    score: Callable[[Sequence[Rollout]], list[np.ndarray]], ranks: Ranks, rollouts: Sequence[Rollout]
) -> list[np.ndarray]:
    """The scores [C] of all rollouts, of which each rank computes a part."""
    own_rollouts = virtual_shards(rollouts, ranks.size)[ranks.rank]
    gathered = ranks.gather_tensors(lambda: pack_scores(score(own_rollouts)))
    return [scores for tensors in gathered for scores in unpack_scores(tensors)]


class RankedReward:
    """A reward that rank 0 computes; every rank gets the values."""

    def __init__(self, opened: Callable[[], Reward], ranks: Ranks):
        """opened: makes the reward, in rank 0 alone. Raises in every rank what it raises there."""
        self._ranks, self._reward = ranks, None

        def open_here() -> bool:
            self._reward = opened()
            return self._reward.binary

        self.binary = ranks.from_first(open_here)

    def values(self, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> np.ndarray:
        return self._ranks.from_first(lambda: self._reward.values(problems, completions))

    def check_answers(self, problems: Sequence[Problem]) -> None:
        self._ranks.from_first(lambda: self._reward.check_answers(problems))


class RankedEquivalence:
    """Classes of completions that rank 0 forms; every rank gets them."""

    def __init__(self, opened: Callable[[], Equivalence], ranks: Ranks):
        """opened: makes them, in rank 0 alone. Raises in every rank what it raises there."""
        self._ranks, self._equivalence = ranks, None

        def open_here() -> None:
            self._equivalence = opened()

        ranks.from_first(open_here)

    def classes(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[list[int]]:
        return self._ranks.from_first(lambda: self._equivalence.classes(problems, groups))


class RankedEnvironments:
    """Environments that rank 0 plays; every rank gets their answers."""

    def __init__(self, opened: Callable[[], Environments], ranks: Ranks):
        """opened: makes them, in rank 0 alone. Raises in every rank what it raises there."""
        self._ranks, self._environments = ranks, None
        self._games: list[Game] = []  # those that were asked since nobody waited for an answer
        self._waiting = 0

        def open_here() -> AboutEnvironments:
            self._environments = opened()
            return self._environments.about

        self.about = ranks.from_first(open_here)

    def ask(self, game: Game) -> None:
        """All ranks ask for the same games in the same order."""
        if not self._waiting:
            self._games = []
        self._games.append(game)
        self._waiting += 1
        if self._environments is not None:
            self._environments.ask(game)

    def answers(self, wait: bool) -> list[tuple[Game, Answer | Failure]]:
        """They are the same in every rank."""

        def answers_here() -> list[tuple[int, Answer | Failure]]:
            places = {id(game): place for place, game in enumerate(self._games)}
            return [(places[id(game)], answer) for game, answer in self._environments.answers(wait)]

        answers = self._ranks.from_first(answers_here)
        self._waiting -= len(answers)
        return [(self._games[place], answer) for place, answer in answers]

    def close_games(self) -> None:
        self._ranks.from_first(lambda: self._environments.close_games())
