"""LoRA's adapters of a model whose ranks share its layers (tensor.py).

A and B are whole in every rank, and so is their base. A rank merges its part of the weights: an element of
W' = round(W + s B A) needs its own element of W, row of B and column of A. It sums the gradient of the rows
of B, or the columns of A, that its part of the weight has, and the whole gradient of the other factor, which
is then in all ranks (cut.py).
"""

from collections.abc import Iterator
from itertools import islice, zip_longest

import numpy as np
import torch

from ....kernels.merge import merge
from ....model.adapters import (
    AdapterLayout,
    Adapters,
    Merged,
    low_rank_by_weight,
    matrices_with_adapters,
)
from ....model.decoder import Decoder
from ....verify.ledger import Tree
from .cut import CutParts
from .gradient import TrainedAdapters
from .spread import Cutting
from .tensor import TensorParts
from .zero import Slices


class SharedAdapters(Adapters):
    """Adapters (model/adapters.py) of a model of which the decoder has a part.

    trained: this rank's part of A and B, which a pass reads.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        flat: torch.Tensor,
        weights: torch.Tensor,
        decoder: Decoder,
        base: torch.dtype,
        model: TensorParts,
    ):
        """As Adapters takes them. decoder: computes with the part `model`, of layout.model."""
        n, self._model = model.ranks.tensor_parallel.size, model
        ranges = [layout.ranges_of_rank(rank, n) for rank in range(n)]
        cutting = Cutting(layout, layout.of_rank(n), ranges)
        self.parts = CutParts(cutting, model.ranks, model.ranks.replicas, decoder.device)
        self.trained = TrainedAdapters(self.parts.part, self.parts.cut(flat.to(decoder.device)))
        self._adapted_part = model.cut(weights)[: model.part.trained_numel].to(decoder.device, base)
        super().__init__(layout, flat, weights, decoder, base)

    def _bring(self) -> None:
        self.take()
        if self.layout.lora.merge:
            self.merge()
        else:
            self.decoder.adapt(low_rank_by_weight(*self.trained))

    def take(self) -> None:
        """Bring this rank's part of A and B up to date."""
        self.trained.flat.copy_(self.parts.cut(self.flat))

    def merge(self) -> int:
        """As Adapters.merge, of all ranks, which call it together."""
        moved = super().merge()
        return sum(self._model.ranks.tensor_parallel.gather(lambda: moved))

    def _matrices(self) -> Iterator[Merged]:
        return matrices_with_adapters(*self.trained, self._adapted_part, self.decoder.flat.detach())

    def swallowed(self) -> list[tuple[int, np.ndarray]]:
        """As Adapters.swallowed. Each rank merges some of the whole matrices. All call it together."""
        ranks, dtype = self._model.ranks.tensor_parallel, self.decoder.dtype
        whole = matrices_with_adapters(self.layout, self.flat, self._adapted, self._adapted)

        def of_rank() -> list[tuple[int, np.ndarray]]:
            rows = []
            for matrix in islice(whole, ranks.rank, None, ranks.size):
                matrix = matrix._replace(w_new=torch.empty_like(matrix.w, dtype=dtype))
                merge(*matrix[1:])
                rows.append((matrix.layer, matrix.swallowed_rows()))
            return rows

        return [x for together in zip_longest(*ranks.gather(of_rank)) for x in together if x is not None]

    def hash_merged(self) -> Tree:
        """The root of the hash tree of all merged weights. All ranks call this together."""
        slices = Slices(self.layout.model, self._model.ranks)
        # They travel in fp32, which holds them exactly.
        vector = self._model.vector(self.decoder.flat.detach()[self._model.own.own].float())
        own_slice = self._model.to_slice(vector).to(self.decoder.dtype)
        return Tree(slices.hash_tree(slices.hashing(own_slice)).root, [])

    def whole_policy(self) -> torch.Tensor:
        """What all ranks compute with, [layout.model.numel]. All call it together."""
        return self._model.joined(self.decoder.flat.detach())
