"""Ranks: the processes of `torchrun -m zerokl train`, each with its own part of the prompts and of the virtual shards.

Every rank holds the whole state and takes every update itself, from the same gradient, so their weights have the same bits. The
gradient is the root of the one tree of gradient.py: a rank's shards are a subtree, and the ranks' roots are sent and added pair by
pair in the tree's order. No all_reduce: its order is the library's. Rank 0 alone writes files.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..kernels.logprob import Distribution
from ..model.decoder import Decoder
from .rollout import Keys, Rollout, Sampler, Sampling
from .scorer import Scorer
from .shard import virtual_shards
from .workers import Workers

X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. Raises ChildProcessError when one has died."""
        if self.size > 1:
            with _peers():
                dist.barrier()

    def gather(self, make: Callable[[], X]) -> list[X]:
        """make() of every rank, in order. What the first rank to fail raised is raised in all."""
        if self.size == 1:
            return [make()]
        try:
            mine: tuple[bool, Any] = (True, make())
        except Exception as error:
            mine = (False, error)
        every: list[Any] = [None] * self.size
        with _peers():
            dist.all_gather_object(every, mine)
        failed = next((value for good, value in every if not good), None)
        if failed is not None:
            raise failed
        return [value for _, value in every]

    def from_first(self, make: Callable[[], X]) -> X:
        """make() of rank 0, in every rank."""
        return self.gather(make if self.first else lambda: None)[0]


ALONE = Ranks()


@contextmanager
def _peers() -> Iterator[None]:
    """Says in one line what a collective's error means."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ChildProcessError(
            f"another rank has ended or does not answer ({reason}); torchrun names it and its exit code; "
            "`zerokl train --resume` goes on with the run, with any number of ranks"
        ) from None


@contextmanager
def join_ranks(shards: int, sampler: str) -> Iterator[Ranks]:
    """The ranks that torchrun started this process among; one without it. Raises ValueError for a number that cannot share the work."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1 or "MASTER_ADDR" not in os.environ:
        yield ALONE
        return
    if size & (size - 1) or size > shards:
        raise ValueError(f"ranks ({size}) must be a power of two and at most virtual_shards ({shards})")
    if sampler != "native":
        raise ValueError(f'ranks: sampler "{sampler}" runs in one process; set sampler = "native"')
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


class RankedWorkers:
    """The workers of one rank, for a step's shards over all ranks. The interface of Workers, as far as training needs it."""

    def __init__(self, workers: Workers, ranks: Ranks):
        self._workers, self._ranks = workers, ranks
        self._other = torch.empty(0)

    @property
    def n(self) -> int:
        """Workers of this rank."""
        return self._workers.n

    def sum_shards(self, work: Callable[[Decoder, X], Y], shards: Sequence[X | None]) -> tuple[list[Y | None], torch.Tensor | None]:
        """See Workers.sum_shards: the same results and gradient in every rank."""
        ranks, each = self._ranks, len(shards) // self._ranks.size
        root: torch.Tensor | None = None

        def own() -> tuple[list[Y | None], bool]:
            nonlocal root
            done, root = self._workers.sum_shards(work, shards[ranks.rank * each : (ranks.rank + 1) * each])
            return done, root is not None

        every = ranks.gather(own)
        with _peers():
            gradient = self._add(root, [has for _, has in every])
        return [result for done, _ in every for result in done], gradient

    def _add(self, root: torch.Tensor | None, has: list[bool]) -> torch.Tensor | None:
        """The upper levels of the tree, as add_roots adds them; then rank 0's sum in every rank. has: whether a rank has a root."""
        rank, size, gap = self._ranks.rank, self._ranks.size, 1
        if not any(has):
            return None
        if self._other.numel() == 0:
            flat = self._workers.host.decoder.flat
            self._other = torch.empty(flat.numel(), device=flat.device)
        while gap < size:
            if rank % (2 * gap) == gap and has[rank]:
                dist.send(root, rank - gap)
            elif rank % (2 * gap) == 0 and has[rank + gap]:
                dist.recv(self._other, rank + gap)
                root = root.add_(self._other) if root is not None else self._other.clone()
            has = [has[r] or (r % (2 * gap) == 0 and has[r + gap]) for r in range(size)]
            gap *= 2
        total = root if rank == 0 else self._other
        dist.broadcast(total, 0)
        return total

    def close(self) -> None:
        """End this rank's other processes."""
        self._workers.close()


class RankedSampler:
    """A sampler whose prompts are spread over the ranks; every rank gets all rollouts."""

    def __init__(self, sampler: Sampler, ranks: Ranks):
        self._sampler, self._ranks = sampler, ranks

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See Sampler."""
        self._sampler.load_weights(weights, version)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Keys) -> list[Rollout]:
        """See Sampler."""
        parts = virtual_shards(prompts, self._ranks.size)
        mine = parts[self._ranks.rank]
        before = keys.first_prompt + sum(map(len, parts[: self._ranks.rank]))

        def own() -> list[Rollout]:
            return self._sampler.generate(mine, sampling, replace(keys, first_prompt=before)) if len(mine) else []

        return [rollout for part in self._ranks.gather(own) for rollout in part]

    def close(self) -> None:
        """See Sampler."""
        self._sampler.close()


class RankedScorer:
    """A Scorer whose rollouts are spread over the ranks; every rank gets all scores."""

    def __init__(self, scorer: Scorer, ranks: Ranks):
        self._scorer, self._ranks, self.decoder = scorer, ranks, scorer.decoder

    def score(self, rollouts: Sequence[Rollout], distribution: Distribution) -> list[np.ndarray]:
        """See Scorer."""
        mine = virtual_shards(rollouts, self._ranks.size)[self._ranks.rank]
        every = self._ranks.gather(lambda: self._scorer.score(mine, distribution) if len(mine) else [])
        return [logp for part in every for logp in part]

    def close(self) -> None:
        """See Scorer."""
        self._scorer.close()
