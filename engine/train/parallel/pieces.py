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
from ....model.weights import VALUE_HEAD_TENSOR, Entry, FlatLayout, Layout
from .process_group import Ranks
from .spread import Moves, Spread
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
    parameters: Mapping[str, "DTensor"],
    parts: Collection[Part],
    folder: Path,
    layout: Layout,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Set a rank's pieces of Parameters, by their names, from a model's folder.

    beside: whole tensors that the folder lacks, by name. A critic's head that is in neither is 0. Raises
    ValueError (see read_rows).
    """
    places = {part.name: part.rows for part in parts}
    rows = read_rows(folder, layout, places) | {name: x[places[name]] for name, x in beside.items()}
    for part in parts:
        local = parameters[part.name].detach().to_local()
        if part.name == VALUE_HEAD_TENSOR and part.name not in rows:
            local.zero_()
        else:
            local.copy_(rows[part.name].view(local.shape))


class Pieces(Spread):
    """This rank's pieces of some weights, as one flat vector [numel], one after another in `parts`' order."""

    def __init__(self, entries: Collection[Entry], ranks: Ranks):
        parts_of_ranks = [parts_of(entries, rank, ranks.size) for rank in range(ranks.size)]
        super().__init__([[(p.start, p.stop) for p in parts] for parts in parts_of_ranks], ranks)
        self.parts = parts_of_ranks[ranks.rank]

    @property
    def rows(self) -> dict[str, slice]:
        """This rank's rows of each tensor of the checkpoint."""
        return {part.name: part.rows for part in self.parts}

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The part of each tensor in a vector [numel]."""
        return list(vector.split([part.stop - part.start for part in self.parts]))


class WayToSlices(Spread):
    """Ranges of what is trained, which have a gradient and an optimizer's state."""

    def find_slices(self, layout: FlatLayout) -> None:
        """Prepare the way to the slices of `layout` and back."""
        slices = Slices(layout, self.ranks)
        with_tiles = [[(part.start, part.stop)] for part in map(slices.of_gradient, slices.parts)]
        self._to_slices, self._to_tiles = Moves(self, slices), Moves(self, Spread(with_tiles, self.ranks))

    def to_gradient_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice and the rest of its last tile (Slices.of_gradient). A call of all ranks."""
        return self._to_tiles.there(vector)

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a vector [numel] in every rank. All ranks call it together."""
        return self._to_slices.there(vector)

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        """The vector [numel] of this rank from the slices of all. More than the slice is ignored."""
        return self._to_slices.back(own_slice)


class TrainedPieces(Pieces, WayToSlices):
    """The pieces of what is trained."""

    def __init__(self, layout: FlatLayout, ranks: Ranks):
        super().__init__(layout.trained, ranks)
        self.find_slices(layout)
