"""How the weights of one flat tensor are spread over ranks: each rank has some ranges of it, as one vector.

Ranks cut the flat tensor into slices (zero.py), or each tensor of the checkpoint into rows (pieces.py). The
ranks of a grid's row have cut it before, into layers and rows of layers (cut.py).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ....model.weights import FlatLayout
from .process_group import Ranks, peers

Range = tuple[int, int]  # from, to


class Spread:
    """Ranges of a flat tensor over ranks. `ranges` are this rank's, ascending, of `numel` elements in all.

    All ranks must call a method that sends something together. Such a method raises ChildProcessError when a
    rank has died.
    """

    def __init__(self, ranges_of: Sequence[Sequence[Range]], ranks: Ranks):
        """ranges_of: of each rank."""
        self.ranks, self.ranges_of = ranks, ranges_of
        self.ranges = ranges_of[ranks.rank]
        self.numel = length(self.ranges)

    @torch.no_grad()
    def gather_into(self, flat: torch.Tensor, vector: torch.Tensor) -> None:
        """Write the vectors of all ranks to their places in `flat`. vector [numel]: this rank's."""
        # In place where a rank has one range; nothing is copied to where it lies already.
        for rank, ranges in enumerate(self.ranges_of):
            if not (n := length(ranges)):
                continue
            in_place = flat[slice(*ranges[0])] if len(ranges) == 1 else None
            part = vector if rank == self.ranks.rank else flat.new_empty(n) if in_place is None else in_place
            if self.ranks.size > 1:
                self.ranks.broadcast(part.view(torch.uint8), rank)  # gloo does not know every dtype
            if part.data_ptr() != flat[ranges[0][0]].data_ptr():
                for (a, b), x in zip(ranges, part.split([b - a for a, b in ranges]), strict=True):
                    flat[a:b] = x


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

    def over(self, within: "Spread") -> list[list[Range]]:
        """Where in the whole lies what each rank has. within: in its part, over those with this part."""
        row = range(self.size)
        return [[place for place, _ in self.places(i, ranges)] for ranges in within.ranges_of for i in row]

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


class Moves:
    """An exchange between two ways in which a flat tensor is spread over ranks. What no rank has is zero."""

    def __init__(self, here: Spread, there: Spread):
        self._ranks = here.ranks
        self._sent = [_overlap(here.ranges, others) for others in there.ranges_of]  # places in the vector
        self._received = [_overlap(there.ranges, others) for others in here.ranges_of]
        self._sizes = here.numel, there.numel

    def there(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector of `there`, from that of `here`. All ranks call it together."""
        return self._move(vector, self._sent, self._received, self._sizes[1])

    def back(self, vector: torch.Tensor) -> torch.Tensor:
        """The other way."""
        return self._move(vector, self._received, self._sent, self._sizes[0])

    def _move(
        self, vector: torch.Tensor, sent: list[list[Range]], received: list[list[Range]], numel: int
    ) -> torch.Tensor:
        outgoing = torch.cat([vector.new_empty(0), *(vector[a:b] for places in sent for a, b in places)])
        sizes = [list(map(length, places)) for places in (received, sent)]
        incoming = outgoing
        if self._ranks.size > 1:
            incoming = vector.new_empty(sum(sizes[0]))
            with peers():
                dist.all_to_all_single(incoming, outgoing, *sizes, group=self._ranks.group)
        moved, start = vector.new_zeros(numel), 0
        for a, b in (place for places in received for place in places):
            moved[a:b] = incoming[start : start + b - a]
            start += b - a
        return moved


def length(ranges: Sequence[Range]) -> int:
    """The elements of some ranges."""
    return sum(b - a for a, b in ranges)


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same elements in as few ranges: a matrix whose columns are shared has one for each row."""
    fewer: list[Range] = []
    for a, b in ranges:
        if fewer and fewer[-1][1] == a:
            fewer[-1] = fewer[-1][0], b
        else:
            fewer.append((a, b))
    return fewer


def in_common(ranges: Sequence[Range], other: Sequence[Range]) -> Iterator[tuple[int, int, Range]]:
    """What two lists of ranges have in common, in ascending order.

    Each with the number of its range in `other`, and its start in the vector of the first.
    """
    start, j = 0, 0
    for a, b in ranges:
        while j < len(other) and other[j][1] <= a:
            j += 1
        for k in range(j, len(other)):
            c, d = other[k]
            if c >= b:
                break
            if (first := max(a, c)) < (last := min(b, d)):
                yield k, start + first - a, (first, last)
        start += b - a


def _overlap(ranges: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """What two lists of ranges have in common, as places in the vector of the first, in ascending order."""
    return merged([(start, start + b - a) for _, start, (a, b) in in_common(ranges, other)])
