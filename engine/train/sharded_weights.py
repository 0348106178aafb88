"""The master weights of a model that FSDP has sharded.

Weights and moments lie in this rank's rows (parallel/pieces.py). The gradient comes in the slices of
parallel/zero.py, where the norm and the ledger read it, and goes to the rows for AdamW. AdamW works element
by element, so where an element lies decides no bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...model.buffers import as_numbers
from ...model.weights import VALUE_HEAD_TENSOR, Layout
from ...verify.ledger import Tree
from .master_weights import Piece, SpreadWeights
from .parallel.gathered import WholeWeights
from .parallel.sharded_model import ShardedModel
from .parallel.zero import Slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedWeights(SpreadWeights):
    """The weights of a ShardedModel.

    whole: of the model. Its decoder is the sampler's, and has its weights only while it draws.
    """

    def __init__(self, model: ShardedModel, whole: WholeWeights):
        self._model, self._pieces, self._whole = model, model.pieces, whole
        self.decoder = whole.decoder
        super().__init__(model.way, Slices(model.layout, model.ranks, self.decoder.device))
        part, whole, shares_layers = self.decoder.layout, self.layout, model.ranks.tensor_parallel.rank > 0
        uncut = [x for x in part.trained if shares_layers and x.shape == whole.entries[x.name].shape]
        self._copies = {name for entry in uncut for name, _ in entry.parts}

    def pieces(self) -> Iterator[Piece]:
        locals_ = self._model.locals()
        places = pairwise(accumulate((x.numel() for x in locals_), initial=0))
        for part, local, (start, stop) in zip(self._pieces.parts, locals_, places, strict=True):
            if start < stop:
                matrices = [slice(0, stop - start)] if part.dim > 1 else []
                is_head = part.name == VALUE_HEAD_TENSOR
                is_copy = part.name in self._copies
                yield Piece(local.view(-1), slice(start, stop), is_head, matrices=matrices, is_copy=is_copy)

    def changed(self) -> int | None:
        """Do nothing: a layer rounds its weights when it gathers them."""
        return None

    def collect(self) -> torch.Tensor | None:
        """In rank 0 alone. Each weight is gathered in its turn."""
        flat = torch.zeros(self.layout.numel) if self.slices.ranks.first else None
        views = (
            {} if flat is None else self.layout.checkpoint_views(flat) | self.layout.beside_checkpoint(flat)
        )
        for name, tensor in self._model.tensors().items():
            whole = tensor.full_tensor()
            if views:
                views[name].copy_(whole)
        return flat

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight is gathered in its turn."""
        trained = {part.name for part in self._pieces.parts}
        for name, tensor in self._model.tensors().items():
            if name not in trained:
                yield name, tensor.full_tensor().cpu()

    def hash_compute(self) -> Tree | None:
        """What a layer computes with is the master weights, rounded once."""
        if self.decoder.dtype == torch.float32:
            return None
        rounded = self._own_slice().to(self.decoder.dtype)
        return self.slices.hash_tree(self.slices.hashing(rounded))

    def gathered(self) -> AbstractContextManager[None]:
        return self._whole.gathered()

    def _own_slice(self) -> torch.Tensor:
        return self._way.to_slice(self._model.master())

    def whole_policy(self) -> tuple[Layout, torch.Tensor]:
        return self._whole.model(self.decoder.flat.detach())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights over all ranks, by their names in the checkpoint; of this rank its rows.

        Buffers are whole, as their numbers. All ranks call this together.
        """
        weights = {name: x for name, x in self._model.tensors().items() if name != VALUE_HEAD_TENSOR}
        return weights | {x: as_numbers(weights[x].full_tensor()) for x in sorted(self.layout.buffers)}

    def placed(self, vector: torch.Tensor) -> dict[str, "DTensor"]:
        """The same of what has an element for each trained weight, such as a moment."""
        return self._model.rows.tensors(vector)

    def collect_beside(self) -> dict[str, torch.Tensor]:
        """What is trained and is no tensor of the checkpoint, a critic's head, whole in every rank.

        All ranks call this together.
        """
        head = self._model.by_name.get(VALUE_HEAD_TENSOR)
        return {} if head is None else {VALUE_HEAD_TENSOR: head.full_tensor()}

    def read(self, folder: Path, beside: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's rows from a checkpoint. beside: what collect_beside gave. Raises ValueError."""
        self._model.read(folder, beside)
