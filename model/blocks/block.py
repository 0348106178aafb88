"""What a block of a layer is, and what its forward is given.

Shapes: T tokens of packed sequences, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from ...kernels.leaves import Leaves
from ...kernels.linear import Adapted
from ...kernels.tile_tables import TileTable
from ..context import Context, Hook, KeepingContext, NarrowingContext, no_hook
from ..numerics import Numerics
from ..operation import Operation
from ..sizes import Sizes

# By their names in the layer. Only a product (kernels/linear.py) has an adapted weight.
LayerWeights = Mapping[str, torch.Tensor | Adapted]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, rotated elements of a head / 2]


class Weight(NamedTuple):
    """A weight of a layer. It holds tensors of the checkpoint, one after another along axis 0."""

    name: str  # in the layer
    width: tuple[int, ...]  # of a row
    parts: tuple[tuple[str, int], ...]  # (checkpoint name from the layer, rows)
    # A tensor that a checkpoint may hold in place of the parts: its name from the layer, and its shape.
    # transformers' own model has the weight in this form.
    together: tuple[str, tuple[int, ...]] | None = None
    # Numbers without a gradient, in fp32 whatever the compute dtype (buffers.py): the rows are their bytes.
    is_buffer: bool = False
    packable: bool = True  # whether products may read a packed copy: not of the matrices of many experts
    # How the ranks of tensor parallelism share it: each has an equal piece of these parts of its rows, or of
    # its columns. Without either, each rank has all of it.
    shared_rows: tuple[int, ...] = ()
    shared_columns: bool = False
    by_expert: bool = False  # whether ranks that share experts have an equal piece of its rows


class Rows(NamedTuple):
    """What a block gives to the next one."""

    x: torch.Tensor | None  # [T, D], which the next norm adds to the residual; None before the first layer
    residual: torch.Tensor  # [T, D]
    context: Context  # of these rows

    def narrowed(self, x: torch.Tensor) -> "Rows":
        """x in the place of the own x, after the last layer has mixed the rows: of the rows that are left."""
        residual, context = self.residual, self.context
        if isinstance(context, NarrowingContext):
            residual, context = context.narrow(residual), context.narrowed
        return Rows(x, residual, context)


class LayerRun(NamedTuple):
    """One forward of one layer."""

    i: int
    config: Sizes
    numerics: Numerics
    rotation: Rotation
    hook: Hook

    @property
    def is_last(self) -> bool:
        """Whether no layer comes after it."""
        return self.i == self.config.layers - 1

    @property
    def order(self) -> tuple[TileTable, Leaves]:
        """What orders the sums of its products with weights: tiles and leaves."""
        return self.numerics.tiles, self.numerics.leaves

    def show(self, name: str, x: torch.Tensor) -> None:
        """Show the hook the output of an operation of the layer."""
        if self.hook is not no_hook:  # names are made only where somebody listens
            self.hook(f"layers.{self.i}.{name}", x)


class Block(ABC):
    """A part of a layer, as a frozen dataclass whose fields are its variants."""

    # Whether every sum that tensor parallelism would cut is made of leaves (kernels/leaves.py).
    has_leaves: bool = False

    @abstractmethod
    def weights(self, c: Sizes) -> Iterator[Weight]:
        """Its weights, in their order in the flat tensor."""

    @abstractmethod
    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        """Its operations in the order of computation, the last of which is its output.

        x: the name of what the block reads.
        """

    @abstractmethod
    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        """Its output in the place of x [T, D]."""

    def dtypes(self, numerics: Numerics, compute: torch.dtype) -> dict[str, torch.dtype | None]:
        """The dtypes of its weights that may be another one than the compute dtype, by name.

        None is the compute dtype.
        """
        return {}

    @property
    def values(self) -> dict[str, Any]:
        """Its variants by name, as JSON holds them. One that is None is of other families only."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if value is not None}


class Mixer(Block):
    """A block in which a row reads rows before it."""

    @abstractmethod
    def keep(self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: KeepingContext) -> None:
        """Let the context keep what later rows read of x [T, D], and compute nothing else."""
