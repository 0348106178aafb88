"""Ranks of a grid, of which each row sums one gradient in parts: one part in each of its ranks.

Along "dp" the ranks have other virtual shards. Along the second dimension they have other parts of the same
gradient: of the layers that they share (tensor.py), or of the rows that they share (ulysses.py). Along "dp"
each rank has one slice of its part (zero.py).

For the norm and the ledger these slices travel to those of the whole model, and back for AdamW: where an
element lies decides no bit.
"""

from collections.abc import Iterator, Sequence

import torch

from ....model.weights import FlatLayout
from .data_parallel import ReplicatedWorkers
from .pieces import WayToSlices
from .process_group import Ranks
from .spread import Range, length, merged
from .workers import Workers
from .zero import Slices


class CutParts(WayToSlices):
    """What each rank of a grid owns of a gradient, of which a vector that no rank cuts may be in several.

    layout: of all weights. part: of the part that ranks along "dp" have in common. own: this rank's slice of
    what is trained there, over these ranks. A vector [numel] holds the weights in `own` one after another,
    without what lies between them in the flat tensor.
    """

    def __init__(
        self,
        layout: FlatLayout,
        part: FlatLayout,
        ranges_of: Sequence[Sequence[Range]],
        ranks: Ranks,
        device: torch.device | None = None,
    ):
        """ranges_of: where the elements of `part` lie in `layout`, for each rank of a row."""
        self.layout, self.part, self._ranges_of = layout, part, ranges_of
        self.own = Slices(part, ranks.data_parallel, device)
        n = len(ranges_of)
        self._rank = ranks.rank % n
        owned = [[place for place, _ in self._places(i, x)] for x in self.own.parts for i in range(n)]
        super().__init__(owned, ranks)
        self.find_slices(layout)
        self._in_own = merged([x for _, x in self._places(self._rank, self.own.own)])

    def _places(self, rank: int, part: slice) -> Iterator[tuple[Range, Range]]:
        """The ranges of a rank's slice `part` in the whole flat tensor; each with its place in the slice."""
        ranges = self._ranges_of[rank]
        for (a, b), start in zip(ranges, self._starts(ranges), strict=True):
            first, last = max(start, part.start), min(start + b - a, part.stop)
            if first < last:
                yield (a + first - start, a + last - start), (first - part.start, last - part.start)

    def _starts(self, ranges: Sequence[Range]) -> Iterator[int]:
        """Where each of a rank's ranges lies in the flat tensor of its part."""
        remaining = iter(ranges)
        for entry in self.part.entries.values():
            start, stop = entry.offset, entry.offset + entry.numel
            while start < stop:
                yield start
                start += length([next(remaining)])

    def vector(self, x: torch.Tensor) -> torch.Tensor:
        """The weights in this rank's slice as a vector [numel]. x: the slice, or more after it."""
        return torch.cat([x[:0], *(x[a:b] for a, b in self._in_own)])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor [layout.numel], as a new flat tensor [part.numel]."""
        vector = torch.cat([whole[a:b] for a, b in self._ranges_of[self._rank]])
        flat, entries = whole.new_zeros(self.part.numel), self.part.entries.values()
        for entry, x in zip(entries, vector.split([entry.numel for entry in entries]), strict=True):
            flat[entry.offset : entry.offset + entry.numel] = x
        return flat


class CutWorkers(ReplicatedWorkers):
    """ReplicatedWorkers along "dp", each of which sums its part of the gradient."""

    def __init__(self, workers: Workers, parts: CutParts, virtual_shards: int):
        super().__init__(workers, parts.own, virtual_shards)
        self._parts = parts

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        return None if root is None else self._parts.to_gradient_slice(self._parts.vector(root))
