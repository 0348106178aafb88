"""Where a rank's pieces of the weights lie, as FSDP cuts them; and the way to the slices of zero.py.

FSDP cuts each tensor of the checkpoint along axis 0: of W ranks and R rows, rank r has the rows from r c on,
c = ceil(R / W) of them at most. The ledger's blocks and the tiles of the gradient's norm lie in the flat
tensor of all weights (model/weights.py), whatever the ranks are. So what is hashed, and what the norm sums,
goes to the slices of this flat tensor: each rank sends every part to the rank whose slice holds it.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ....model.checkpoint import read_rows
from ....model.weights import VALUE_HEAD_TENSOR, Entry, Layout
from .process_group import Ranks
from .spread import Cutting, Moves, Spread
from .zero import Slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
    parameters: "Mapping[str, DTensor]", parts: Iterable[Part], values: Iterable[torch.Tensor]
) -> None:
    """Set a rank's parts of Parameters, by their names. values: of each part, [numel]."""
    for part, x in zip(parts, values, strict=True):
        local = parameters[part.name].detach().to_local()
        local.copy_(x.view(local.shape))


def read_parts(
    parts: Collection[Part],
    folder: Path,
    layout: Layout,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """These parts of a model's folder, [numel] fp32 each.

    beside: whole tensors that the folder lacks, by name. A critic's head that is in neither is 0. Raises
    ValueError (see read_rows).
    """
    places = {part.name: part.rows for part in parts}
    rows = read_rows(folder, layout, places) | {name: x[places[name]] for name, x in beside.items()}
    if VALUE_HEAD_TENSOR in places:
        place = places[VALUE_HEAD_TENSOR]
        rows.setdefault(VALUE_HEAD_TENSOR, torch.zeros(place.stop - place.start))
    return [rows[part.name].reshape(-1) for part in parts]


class Pieces(Spread):
    """This rank's pieces of some weights, as one flat vector [numel], one after another in `parts`' order."""

    def __init__(self, entries: Collection[Entry], ranks: Ranks):
        parts_of_ranks = [parts_of(entries, rank, ranks.size) for rank in range(ranks.size)]
        super().__init__([[(p.start, p.stop) for p in parts] for parts in parts_of_ranks], ranks)
        self.parts, self.entries = parts_of_ranks[ranks.rank], [entry.name for entry in entries]

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The part of each tensor in a vector [numel]."""
        return list(vector.split([part.stop - part.start for part in self.parts]))


class WholeRows:
    """The way to rows of whole tensors, over all ranks as FSDP cuts them: files are written and read by them.

    pieces: of the part of a model that each rank has (Cutting), over the ranks that have the same part.
    """

    def __init__(self, cutting: Cutting, pieces: Pieces, ranks: Ranks):
        entries = [cutting.layout.entries[name] for name in pieces.entries]
        self._cutting, self._pieces, self._rows = cutting, pieces, Pieces(entries, ranks)
        self._shapes = {name: (rows, *e.shape[1:]) for e in entries for name, rows in e.parts}
        if cutting.size > 1:
            self._moves = Moves(Spread(cutting.over(pieces), ranks), self._rows)

    def read(
        self, folder: Path, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> list[torch.Tensor]:
        """The pieces of a model's folder, [numel] each. beside: see read_parts. A call of all ranks."""
        rows = read_parts(self._rows.parts, folder, self._cutting.layout, beside)
        return rows if self._cutting.size == 1 else self._pieces.split(self._moves.back(torch.cat(rows)))

    def tensors(self, vector: torch.Tensor) -> "dict[str, DTensor]":
        """Whole tensors, of which each rank has its rows. vector: all pieces. A call of all ranks."""
        from torch.distributed.tensor import DTensor, Shard

        rows = vector if self._cutting.size == 1 else self._moves.there(vector)
        placed = {}
        for part, x in zip(self._rows.parts, self._rows.split(rows), strict=True):
            like = torch.empty(self._shapes[part.name], device="meta")
            local = x.view(part.rows.stop - part.rows.start, *like.shape[1:])
            placement = {"run_check": False, "shape": like.shape, "stride": like.stride()}
            placed[part.name] = DTensor.from_local(local, self._rows.ranks.mesh, [Shard(0)], **placement)
        return placed


class WayToSlices(Spread):
    """Ranges of what is trained, which have a gradient and an optimizer's state."""

    def __init__(self, cutting: Cutting, within: Spread, ranks: Ranks):
        """within: what each rank has of its part, over the ranks that have the same part."""
        self.cutting = cutting
        super().__init__(cutting.over(within), ranks)
        slices = Slices(cutting.layout, ranks)
        with_tiles = [[(part.start, part.stop)] for part in map(slices.of_gradient, slices.parts)]
        self._to_slices, self._to_tiles = Moves(self, slices), Moves(self, Spread(with_tiles, ranks))

    def to_gradient_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice and the rest of its last tile (Slices.of_gradient). A call of all ranks."""
        return self._to_tiles.there(vector)

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a vector [numel] in every rank. All ranks call it together."""
        return self._to_slices.there(vector)

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        """The vector [numel] of this rank from the slices of all. More than the slice is ignored."""
        return self._to_slices.back(own_slice)
