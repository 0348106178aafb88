"""Tensor parallelism: ranks that share each layer, and its weights, as kernels/leaves.py cuts sums.

The ranks are a grid. Along "tp" they share layers: a rank has whole heads, and columns of the MLP and of the
vocabulary. It computes every token of its row with them, and joins the sums that are cut with those of the
other ranks. So these see the same rows, draw the same tokens and know all scores. Of a vector that no rank
cuts, such as a norm, each has all. Along "dp" they have parts of the prompts and of the virtual shards, as
ranks with whole weights do, and one slice each of their part of the weights (zero.py).

For the norm and the ledger these slices travel to those of the whole model, and back for AdamW: where an
element lies decides no bit.
"""

from collections.abc import Iterator

import torch

from ....model.weights import Layout, fingerprint
from .data_parallel import ReplicatedWorkers
from .pieces import WayToSlices
from .process_group import Ranks
from .scorer import Scorer
from .spread import Range, Spread, length, merged
from .workers import Workers
from .zero import Slices


class TensorParts(WayToSlices):
    """What each rank of a grid owns of a model, of which a vector that no rank cuts is in several.

    layout: of the whole model. part: of the part that ranks along "dp" have in common. own: this rank's slice
    of what is trained there, over these ranks. A vector [numel] holds the weights in `own` one after another,
    without what lies between them in the flat tensor. Frozen weights are cut in the same way, and are in no
    slice.
    """

    def __init__(self, layout: Layout, ranks: Ranks, device: torch.device | None = None):
        self.layout, self.part = layout, layout.of_rank(ranks.tensor_parallel.size)
        self.own = Slices(self.part, ranks.data_parallel, device)
        n = ranks.tensor_parallel.size
        owned = [
            [place for place, _ in self._places(tensor_rank, part)]
            for part in self.own.parts
            for tensor_rank in range(n)
        ]
        super().__init__(owned, ranks)
        self.find_slices(layout)
        self._in_own = merged([x for _, x in self._places(ranks.tensor_parallel.rank, self.own.own)])

    def _places(self, tensor_rank: int, part: slice) -> Iterator[tuple[Range, Range]]:
        """The ranges of a rank's slice `part` in the whole flat tensor; each with its place in the slice."""
        ranges = self.layout.ranges_of_rank(tensor_rank, self.part.config.ranks)
        for (a, b), start in zip(ranges, self._starts(ranges), strict=True):
            first, last = max(start, part.start), min(start + b - a, part.stop)
            if first < last:
                yield (a + first - start, a + last - start), (first - part.start, last - part.start)

    def _starts(self, ranges: list[Range]) -> Iterator[int]:
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
        ranges = self.layout.ranges_of_rank(self.ranks.tensor_parallel.rank, self.part.config.ranks)
        vector, flat = torch.cat([whole[a:b] for a, b in ranges]), whole.new_zeros(self.part.numel)
        entries = self.part.entries.values()
        for entry, x in zip(entries, vector.split([entry.numel for entry in entries]), strict=True):
            flat[entry.offset : entry.offset + entry.numel] = x
        return flat

    def joined(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole flat tensor [layout.numel] in every rank, from the part of each. All ranks call it."""
        whole = flat.new_zeros(self.layout.numel)
        self.gather_into(whole, self.vector(flat[self.own.own]))
        ranks, place = self.ranks.tensor_parallel, slice(self.part.trained_numel, None)
        frozen = [list(self._places(rank, slice(place.start, self.part.numel))) for rank in range(ranks.size)]
        vector = torch.cat([flat[:0], *(flat[place][a:b] for _, (a, b) in frozen[ranks.rank])])
        Spread([[x for x, _ in places] for places in frozen], ranks).gather_into(whole, vector)
        return whole


class TensorWorkers(ReplicatedWorkers):
    """ReplicatedWorkers along "dp", of ranks that share the model along "tp"."""

    def __init__(self, workers: Workers, parts: TensorParts, virtual_shards: int):
        super().__init__(workers, parts.own, virtual_shards)
        self._parts = parts

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        return None if root is None else self._parts.to_gradient_slice(self._parts.vector(root))


class SharedScorer(Scorer):
    """A Scorer whose decoder has this rank's part of a model. Ranks along "tp" score the same rollouts."""

    def __init__(self, workers: Workers, micro_batch: int, parts: TensorParts):
        super().__init__(workers, micro_batch)
        self._parts = parts

    def fingerprint(self) -> str:
        """The hash of the whole model. All ranks call this together."""
        return fingerprint(self._parts.layout, self._parts.joined(self.decoder.flat.detach()))
