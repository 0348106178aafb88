"""Ranks of a grid that sum one gradient in parts.

The grid is (dp, cp, tp), with the last as neighbours, or (dp, ep). Along "dp" the ranks have other virtual
shards. Along the other dimensions they have parts of the same gradient: of the layers that they share along
"tp" (tensor.py), of the rows along "cp" (ulysses.py), and of the experts along "ep" (expert.py). What several
ranks have in common lies in slices over them (zero.py).

For the norm and the ledger these slices travel to those of the whole model, and back for AdamW: where an
element lies decides no bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ....kernels.shared_rows import SharedRows
from .data_parallel import ReplicatedWorkers
from .gradient import ShardsWork
from .pieces import WayToSlices
from .process_group import Ranks
from .spread import Cutting, merged
from .workers import Workers
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


class CutParts(WayToSlices):
    """What each rank of a grid owns of a gradient, of which a vector that no rank cuts may be in several.

    part: the layout of what a rank has of `layout`. own: this rank's slice of what is trained there. A vector
    [numel] holds the weights in `own` one after another, without what lies between them in the flat tensor.
    """

    def __init__(self, cutting: Cutting, ranks: Ranks, along: Ranks, device: torch.device | None = None):
        """along: the ranks that have the same part, which they share in slices."""
        self.layout, self.part = cutting.layout, cutting.part
        self.own, self._rank = Slices(self.part, along, device), ranks.rank % cutting.size
        super().__init__(cutting, self.own, ranks)
        place = self.own.own
        self._in_own = merged([x for _, x in cutting.places(self._rank, [(place.start, place.stop)])])

    def vector(self, x: torch.Tensor) -> torch.Tensor:
        """The weights in this rank's slice as a vector [numel]. x: the slice, or more after it."""
        return torch.cat([x[:0], *(x[a:b] for a, b in self._in_own)])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor [layout.numel], as a new flat tensor [part.numel]."""
        return self.cutting.cut(whole, self._rank)


class CutWorkers(ReplicatedWorkers):
    """ReplicatedWorkers along "dp", each of which sums its part of the gradient."""

    def __init__(self, workers: Workers, parts: CutParts, virtual_shards: int):
        """parts: of the gradient, in slices along "dp"."""
        super().__init__(workers, parts.own, virtual_shards)
        self._parts, self._shared = parts, SharedRows(parts.ranks.context_parallel)

    def sum_shards(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """work: where ranks share rows, a dataclass whose `shared` says who does (shard.py)."""
        work = replace(work, shared=self._shared) if self._shared.size > 1 else work
        return super().sum_shards(work, shards)

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        return None if root is None else self._parts.to_gradient_slice(self._parts.vector(root))
