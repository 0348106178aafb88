"""Ranks of a grid, of which each row has one copy of the model, and sums one gradient in parts.

The grid is (dp, cp, tp), with the last as neighbours. Along "dp" the ranks have other virtual shards. Along
the other dimensions they have parts of the same gradient: of the layers that they share along "tp"
(tensor.py), and of the rows that they share along "cp" (ulysses.py). What several ranks have in common lies
in slices over them (zero.py).

For the norm and the ledger these slices travel to those of the whole model, and back for AdamW: where an
element lies decides no bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ....kernels.shared_rows import SharedRows
from ....model.weights import FlatLayout
from .data_parallel import ReplicatedWorkers
from .gradient import ShardsWork
from .pieces import WayToSlices
from .process_group import Ranks
from .spread import Range, in_common, merged
from .workers import Workers
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


class Cutting:
    """How the ranks of a row cut a flat tensor [layout.numel]. Of it a rank has one of [part.numel]."""

    def __init__(self, layout: FlatLayout, part: FlatLayout, ranges_of: Sequence[Sequence[Range]]):
        """ranges_of: where the elements of `part` lie in `layout`, for each rank, in their order."""
        self.layout, self.part, self.ranges_of = layout, part, ranges_of

    @classmethod
    def uncut(cls, layout: FlatLayout) -> "Cutting":
        """One rank has all."""
        entries = layout.entries.values()
        return cls(layout, layout, [[(e.offset, e.offset + e.numel) for e in entries]])

    @property
    def size(self) -> int:
        """The ranks of a row."""
        return len(self.ranges_of)

    def then(self, other: "Cutting") -> "Cutting":
        """Each part cut again, as `other` cuts it. The ranks of this cut are neighbours."""
        ranges = [
            [place for place, _ in self.places(rank, part_ranges)]
            for part_ranges in other.ranges_of
            for rank in range(self.size)
        ]
        return Cutting(self.layout, other.part, ranges)

    def places(self, rank: int, ranges: Sequence[Range]) -> Iterator[tuple[Range, Range]]:
        """Where ranges of a rank's part lie in the whole; each with its place in the vector of `ranges`."""
        wholes = self.ranges_of[rank]
        starts = list(self._starts(wholes))
        in_part = [(start, start + b - a) for start, (a, b) in zip(starts, wholes, strict=True)]
        for k, start, (first, last) in in_common(ranges, in_part):
            a = wholes[k][0] + first - starts[k]
            yield (a, a + last - first), (start, start + last - first)

    def _starts(self, wholes: Sequence[Range]) -> Iterator[int]:
        """Where each of a rank's ranges lies in the flat tensor of its part."""
        remaining = iter(wholes)
        for entry in self.part.entries.values():
            start, stop = entry.offset, entry.offset + entry.numel
            while start < stop:
                yield start
                a, b = next(remaining)
                start += b - a

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a flat tensor [layout.numel], as a new flat tensor [part.numel]."""
        vector = torch.cat([whole[a:b] for a, b in self.ranges_of[rank]])
        flat, entries = whole.new_zeros(self.part.numel), self.part.entries.values()
        for entry, x in zip(entries, vector.split([entry.numel for entry in entries]), strict=True):
            flat[entry.offset : entry.offset + entry.numel] = x
        return flat


class CutParts(WayToSlices):
    """What each rank of a grid owns of a gradient, of which a vector that no rank cuts may be in several.

    part: the layout of what a rank has of `layout`. own: this rank's slice of what is trained there. A vector
    [numel] holds the weights in `own` one after another, without what lies between them in the flat tensor.
    """

    def __init__(self, cutting: Cutting, ranks: Ranks, along: Ranks, device: torch.device | None = None):
        """along: the ranks that have the same part, which they share in slices."""
        self.cutting, self.layout, self.part = cutting, cutting.layout, cutting.part
        self.own, self._rank = Slices(self.part, along, device), ranks.rank % cutting.size
        row = range(cutting.size)
        owned = [[place for place, _ in self._places(i, x)] for x in self.own.parts for i in row]
        super().__init__(owned, ranks)
        self.find_slices(self.layout)
        self._in_own = merged([x for _, x in self._places(self._rank, self.own.own)])

    def _places(self, rank: int, part: slice) -> Iterator[tuple[Range, Range]]:
        """The ranges of a rank's slice `part` in the whole flat tensor; each with its place in the slice."""
        return self.cutting.places(rank, [(part.start, part.stop)])

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
