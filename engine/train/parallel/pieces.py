"""Where a rank's pieces of the weights lie, as FSDP cuts them; and the way to the slices of zero.py.

FSDP cuts each tensor of the checkpoint along axis 0: of W ranks and R rows, rank r has the rows from r c on,
c = ceil(R / W) of them at most. The ledger's blocks and the tiles of the gradient's norm lie in the flat
tensor of all weights (model/weights.py), whatever the ranks are. So what is hashed, and what the norm sums,
goes to the slices of this flat tensor: each rank sends every part to the rank whose slice holds it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ....model.weights import VALUE_HEAD_TENSOR, Entry, FlatLayout
from .process_group import Ranks
from .zero import Slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Range = tuple[int, int]  # from, to


class Part(NamedTuple):
    """One tensor of the checkpoint, and the rows of it that a rank has."""

    name: str
    dim: int
    rows: slice
    start: int  # of these rows in the flat tensor
    stop: int


def parts_of(entries: Iterable[Entry], rank: int, size: int) -> list[Part]:
    """What one of `size` ranks has of each tensor in these weights, in the order of the flat tensor."""
    parts = []
    for entry in entries:
        offset, width = entry.offset, entry.numel // entry.shape[0]
        for name, rows in entry.parts:
            most = -(-rows // size)
            a, b = min(rank * most, rows), min((rank + 1) * most, rows)
            parts.append(Part(name, len(entry.shape), slice(a, b), offset + a * width, offset + b * width))
            offset += rows * width
    return parts


@torch.no_grad()
def fill_pieces(
    parameters: Mapping[str, "DTensor"], parts: Iterable[Part], rows: Mapping[str, torch.Tensor]
) -> None:
    """Set a rank's pieces of Parameters, by their names. A critic's head without any rows is 0."""
    for part in parts:
        local = parameters[part.name].detach().to_local()
        if part.name == VALUE_HEAD_TENSOR and part.name not in rows:
            local.zero_()
        else:
            local.copy_(rows[part.name].view(local.shape))


class Pieces:
    """This rank's pieces of some weights, as one flat vector [numel], one after another in `parts`' order."""

    def __init__(self, entries: Collection[Entry], ranks: Ranks):
        self._ranks = ranks
        self._parts_of = [parts_of(entries, rank, ranks.size) for rank in range(ranks.size)]
        self.parts = self._parts_of[ranks.rank]
        self.numel = _length(self.ranges(ranks.rank))

    @property
    def rows(self) -> dict[str, slice]:
        """This rank's rows of each tensor of the checkpoint."""
        return {part.name: part.rows for part in self.parts}

    def ranges(self, rank: int) -> list[Range]:
        """Where the pieces of a rank lie in the flat tensor."""
        return [(part.start, part.stop) for part in self._parts_of[rank]]

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The part of each tensor in a vector [numel]."""
        return list(vector.split([part.stop - part.start for part in self.parts]))

    @torch.no_grad()
    def gather_into(self, flat: torch.Tensor, rank_pieces: torch.Tensor) -> None:
        """Write the pieces of all ranks to their places in `flat`. All ranks call this together.

        rank_pieces [numel]: this rank's, in the dtype of `flat`.
        """
        for rank in range(self._ranks.size):
            ranges = self.ranges(rank)
            n = _length(ranges)
            pieces = rank_pieces if rank == self._ranks.rank else rank_pieces.new_empty(n)
            if self._ranks.size > 1 and n:
                self._ranks.broadcast(pieces.view(torch.uint8), rank)  # gloo does not know every dtype
            start = 0
            for a, b in ranges:
                flat[a:b] = pieces[start : start + b - a]
                start += b - a


class TrainedPieces(Pieces):
    """The pieces of what is trained, which have a gradient and an optimizer's state."""

    def __init__(self, layout: FlatLayout, ranks: Ranks):
        super().__init__(layout.trained, ranks)
        slices = Slices(layout, ranks)
        slice_ranges = [(part.start, part.stop) for part in slices.parts]
        with_tiles = [(part.start, part.stop) for part in map(slices.of_gradient, slices.parts)]
        self._to_slices, self._to_tiles = (
            _Moves(list(map(self.ranges, range(ranks.size))), [[x] for x in places], ranks)
            for places in (slice_ranges, with_tiles)
        )

    def to_gradient_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice and the rest of its last tile (Slices.of_gradient). A call of all ranks."""
        return self._to_tiles.there(vector)

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a vector [numel] in every rank. All ranks call it together."""
        return self._to_slices.there(vector)

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        """The vector [numel] of this rank from the slices of all. More than the slice is ignored."""
        return self._to_slices.back(own_slice)


class _Moves:
    """An exchange between two ways in which the flat tensor is spread over the ranks.

    here, there: for each rank the ranges that it has, in ascending order. What no rank has here is zero.
    """

    def __init__(self, here: Sequence[Sequence[Range]], there: Sequence[Sequence[Range]], ranks: Ranks):
        self._ranks, rank = ranks, ranks.rank
        self._sent = [_overlap(here[rank], others) for others in there]  # places in the own vector
        self._received = [_overlap(there[rank], others) for others in here]
        self._sizes = _length(here[rank]), _length(there[rank])

    def there(self, vector: torch.Tensor) -> torch.Tensor:
        return self._move(vector, self._sent, self._received, self._sizes[1])

    def back(self, vector: torch.Tensor) -> torch.Tensor:
        return self._move(vector, self._received, self._sent, self._sizes[0])

    def _move(
        self, vector: torch.Tensor, sent: list[list[Range]], received: list[list[Range]], numel: int
    ) -> torch.Tensor:
        outgoing = torch.cat([vector.new_empty(0), *(vector[a:b] for places in sent for a, b in places)])
        sizes = [list(map(_length, places)) for places in (received, sent)]
        incoming = outgoing
        if self._ranks.size > 1:
            incoming = vector.new_empty(sum(sizes[0]))
            dist.all_to_all_single(incoming, outgoing, *sizes, group=self._ranks.group)
        moved, start = vector.new_zeros(numel), 0
        for a, b in (place for places in received for place in places):
            moved[a:b] = incoming[start : start + b - a]
            start += b - a
        return moved


def _length(ranges: Sequence[Range]) -> int:
    return sum(b - a for a, b in ranges)


def _overlap(ranges: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """What two lists of ranges have in common, as places in the vector of the first, in ascending order."""
    places, start, j = [], 0, 0
    for a, b in ranges:
        while j < len(other) and other[j][1] <= a:
            j += 1
        for c, d in other[j:]:
            if c >= b:
                break
            if (first := max(a, c)) < (last := min(b, d)):
                places.append((start + first - a, start + last - a))
        start += b - a
    return places
