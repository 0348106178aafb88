"""The master weights of a model whose ranks share its layers (parallel/tensor.py)."""

from collections.abc import Iterator
from itertools import accumulate

import torch

from ...model.decoder import Decoder
from ...model.weights import VALUE_HEAD, Layout
from ...verify.ledger import Tree
from .master_weights import MasterWeights, Piece
from .parallel.tensor import TensorParts
from .parallel.zero import Slices


class TensorWeights(MasterWeights):
    """The weights of one rank's part, [parts.part.numel] fp32; the decoder computes with them, rounded."""

    def __init__(self, decoder: Decoder, weights: torch.Tensor, parts: TensorParts):
        """weights: the first master weights of the whole model, [parts.layout.numel] fp32."""
        self.decoder, self._parts = decoder, parts
        self.slices = Slices(parts.layout, parts.ranks, decoder.device)
        self._in_place = decoder.dtype == torch.float32
        self._master = decoder.flat.detach() if self._in_place else parts.cut(weights).to(decoder.device)

    @property
    def numel(self) -> int:
        return self._parts.numel

    def pieces(self) -> Iterator[Piece]:
        entries, flat = self._parts.part.trained, self.decoder.flat.detach()
        starts = accumulate((entry.numel for entry in entries), initial=0)
        for entry, start in zip(entries, starts, strict=False):
            in_flat = slice(entry.offset, entry.offset + entry.numel)
            rounded = None if self._in_place else flat[in_flat]
            place = slice(start, start + entry.numel)
            yield Piece(self._master[in_flat], place, entry.name == VALUE_HEAD, rounded)

    def matrices(self) -> Iterator[torch.Tensor]:
        views = self._parts.part.views(self._master)
        return (view for view in views.values() if view.dim() > 1)

    def changed(self) -> None:
        """Do nothing: AdamW rounds a piece when it has changed it."""

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        return self._parts.to_slice(vector)

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        place = self.slices.own
        return self._parts.from_slice(own_slice[: place.stop - place.start].to(self.decoder.device))

    def collect(self) -> torch.Tensor | None:
        return self.slices.collect(self._slice_of(self._master))

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def hash(self) -> Tree:
        return self.slices.hash_tree(self.slices.hashing(self._slice_of(self._master)))

    def hash_compute(self) -> Tree | None:
        if self._in_place:
            return None
        # They travel in fp32, which holds them exactly.
        own_slice = self._slice_of(self.decoder.flat.detach().float()).to(self.decoder.dtype)
        return self.slices.hash_tree(self.slices.hashing(own_slice))

    def whole_policy(self) -> tuple[Layout, torch.Tensor]:
        return self._parts.layout, self._parts.joined(self.decoder.flat.detach())

    @torch.no_grad()
    def load(self, weights: torch.Tensor) -> None:
        """Replace all by this rank's part of `weights` [parts.layout.numel] fp32."""
        part = self._parts.cut(weights)
        self.decoder.flat.copy_(part)
        if not self._in_place:
            self._master.copy_(part)

    def _slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice of what is flat over the parts."""
        return self._parts.to_slice(self._parts.vector(flat))
