"""LoRA's adapters over a model that FSDP has sharded.

A and B are small, and whole in every rank, as without FSDP: the optimizer's state of them lies in the slices
of zero.py. The base and the merged weights are spread. Each rank merges its own rows: a row of
W' = round(W + s B A) needs the same row of W and of B, and all of A. Where nothing is merged, a layer has the
adapters beside the base that FSDP gathers.

FSDP only gathers here: no Parameter has a gradient. A rank sums the gradient of A and B of its virtual shard
in one buffer, and the ranks add theirs by the tree of gradient.py, as in data_parallel.py.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from ....files.bitwise import unequal
from ....kernels.grad import GradBuffer
from ....kernels.merge import merge
from ....model.adapters import Merged, adapter_buffers_by_name, layer_of
from ....model.decoder import Decoder
from ....verify.ledger import Tree
from .data_parallel import RankedWorkers
from .gradient import OnePassWork, TrainedAdapters
from .sharded_model import ShardedModel
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


class AdapterGradient:
    """The gradient of A and B of one virtual shard, [layout.numel] fp32; and where a pass adds it up.

    buffers: by the name of the weight that is adapted.
    """

    def __init__(self, adapters: TrainedAdapters):
        layout = adapters.layout
        self.flat = torch.zeros(layout.trained_numel, device=adapters.flat.device)
        sums = {
            e.name: GradBuffer(self.flat[e.offset : e.offset + e.numel].view(1, *e.shape))
            for e in layout.trained
        }
        self.buffers = adapter_buffers_by_name(*adapters, sums)


class ShardedAdapters:
    """Adapters (model/adapters.py) of a spread base: a rank has its rows of what is adapted."""

    def __init__(self, adapters: TrainedAdapters, model: ShardedModel, decoder: Decoder, base: torch.dtype):
        """model: with the base in it; the adapters are merged into it at once, if they are to be.

        decoder: see WholeWeights.
        """
        self.layout, self.flat = adapters
        self._model, self.decoder = model, decoder
        self._base: dict[str, torch.Tensor] = {}  # of what is merged
        if self.layout.lora.merge:
            parts = zip(model.pieces.parts, model.locals(), strict=True)
            self._base = {part.name: x.to(base, copy=True) for part, x in parts}
        self._pieces = dict(zip((p.name for p in model.pieces.parts), model.pieces.parts, strict=True))
        if self._base:
            self.merge()

    @torch.no_grad()
    def merge(self) -> int:
        """Compute this rank's rows of the merged weights again.

        Returns how many of all ranks' have other bits than before. All ranks call this together.
        """
        moved = 0
        for before, matrix in self._matrices():
            merged = torch.empty_like(matrix.w_new)
            merge(merged, *matrix[2:])
            moved += int(unequal(merged, matrix.w_new).sum())
            before.copy_(merged)  # fp32 holds it exactly
        return sum(self._model.ranks.gather(lambda: moved))

    def swallowed(self) -> list[tuple[int, np.ndarray]]:
        """As Adapters.swallowed, of all ranks' rows. All ranks call this together."""
        own_rows = [(matrix.layer, matrix.swallowed_rows()) for _, matrix in self._matrices()]
        return [rows for rank_rows in self._model.ranks.gather(lambda: own_rows) for rows in rank_rows]

    def _matrices(self) -> Iterator[tuple[torch.Tensor, Merged]]:
        """This rank's rows of each adapted matrix, if it has any: as they lie, and as operands."""
        locals_ = dict(zip(self._pieces, self._model.locals(), strict=True))
        for adapter in self.layout.adapters:
            name = f"{adapter.module}.weight"
            if len(base := self._base[name]):
                b, a = (
                    self.flat[e.offset : e.offset + e.numel].view(e.shape) for e in (adapter.b, adapter.a)
                )
                merged, rows = locals_[name].to(self._model.dtype), self._pieces[name].rows
                factors = b[rows], a, self.layout.lora.scale
                yield locals_[name], Merged(layer_of(adapter.weight), merged, base, *factors)

    def base_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All ranks iterate together: each weight is gathered in its turn."""
        for name in self._model.by_name:
            yield name, self._model.whole(name, self._base.get(name)).cpu()

    def hash_merged(self) -> Tree:
        """The root of the hash tree of the merged weights, in the compute dtype. It has no leaves."""
        way, slices = self._model.way, Slices(self._model.layout, self._model.ranks)
        merged = way.to_slice(self._model.master()).to(self._model.dtype)
        return Tree(slices.hash_tree(slices.hashing(merged)).root, [])


class ShardedAdapterWorkers(RankedWorkers):
    """As ShardedWorkers, with the gradient of the adapters. slices: of the adapters."""

    def __init__(self, model: ShardedModel, gradient: AdapterGradient, slices: Slices, virtual_shards: int):
        super().__init__(model.ranks.size, virtual_shards)
        self._model, self._gradient, self._slices = model, gradient, slices

    def _sum_round(
        self, work: OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """The results of all ranks, and this rank's slice of the gradients' sum."""
        self._gradient.flat.zero_()
        results, has_gradient = self._model.compute_round(work, shards)
        if not has_gradient:
            self._gradient.flat.zero_()
        present = [shard is not None for shard in shards]
        gradient = self._gradient.flat if present[self._model.ranks.rank] else None
        return results, self._slices.sum_roots(gradient, present)
