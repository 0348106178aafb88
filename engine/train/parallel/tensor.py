"""Tensor parallelism: ranks that share each layer, and its weights, as kernels/leaves.py cuts sums.

A rank has whole heads, and columns of the MLP and of the vocabulary. It computes every token with them, and
joins the sums that are cut with those of the other ranks. So all ranks see the same rows, draw the same
tokens and know all scores. Of a vector that no rank cuts, such as a norm, each rank has all.

The gradient of a rank's part is the root of the tree over all virtual shards (gradient.py). For the norm and
the ledger its parts travel to the slices of zero.py, and back for AdamW: where an element lies decides no
bit.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from ....model.weights import Layout, fingerprint
from .data_parallel import RankedWorkers
from .gradient import ShardsWork
from .pieces import WayToSlices
from .process_group import Ranks
from .scorer import Scorer
from .spread import length
from .workers import Workers

X = TypeVar("X")
Y = TypeVar("Y")


class TensorParts(WayToSlices):
    """The parts of a model that ranks share, of which a vector that no rank cuts is in each.

    layout: of the whole model. part: of this rank's part. A vector [numel] holds its weights one after
    another, without what lies between them in the flat tensor.
    """

    def __init__(self, layout: Layout, ranks: Ranks):
        self.layout, self.part = layout, layout.of_rank(ranks.size)
        super().__init__([layout.ranges_of_rank(rank, ranks.size) for rank in range(ranks.size)], ranks)
        assert self.numel == sum(entry.numel for entry in self.part.trained)
        self.find_slices(layout)

    def vector(self, flat: torch.Tensor) -> torch.Tensor:
        """The weights of a flat tensor [part.numel] as a vector [numel]."""
        return torch.cat([flat[e.offset : e.offset + e.numel] for e in self.part.trained])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor [layout.numel], as a new flat tensor [part.numel]."""
        vector = torch.cat([whole[a:b] for a, b in self.ranges])
        flat = whole.new_zeros(self.part.numel)
        sizes = [entry.numel for entry in self.part.trained]
        for entry, x in zip(self.part.trained, vector.split(sizes), strict=True):
            flat[entry.offset : entry.offset + entry.numel] = x
        return flat

    def joined(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole flat tensor [layout.numel] in every rank, from the part of each. All ranks call it."""
        whole = flat.new_zeros(self.layout.numel)
        parts = self.ranks.all_gather(self.vector(flat))
        for ranges, vector in zip(self.ranges_of, parts, strict=True):
            for (a, b), x in zip(ranges, vector.split([length([r]) for r in ranges]), strict=True):
                whole[a:b] = x
        return whole


class TensorWorkers(RankedWorkers):
    """The one worker of a rank that shares the model. Every rank computes all virtual shards."""

    def __init__(self, workers: Workers, parts: TensorParts, virtual_shards: int):
        super().__init__(virtual_shards, virtual_shards)
        self._workers, self._parts = workers, parts

    def _sum_round(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        return self._workers.sum_shards(work, shards)

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        return None if root is None else self._parts.to_gradient_slice(self._parts.vector(root))

    def close(self) -> None:
        self._workers.close()


class SharedScorer(Scorer):
    """A Scorer whose decoder has this rank's part of a model. Every rank scores all rollouts."""

    def __init__(self, workers: Workers, micro_batch: int, parts: TensorParts):
        super().__init__(workers, micro_batch)
        self._parts = parts

    def fingerprint(self) -> str:
        """The hash of the whole model. All ranks call this together."""
        return fingerprint(self._parts.layout, self._parts.joined(self.decoder.flat.detach()))
