"""The master weights of a model whose ranks share its layers (parallel/tensor.py)."""

from collections.abc import Iterator

import torch

from ...model.decoder import Decoder
from ...model.weights import VALUE_HEAD, Layout
from ...verify.ledger import Tree
from .master_weights import AdapterWeights, Piece, SpreadWeights, WholeFrozen
from .parallel.tensor import TensorParts
from .parallel.tensor_adapters import SharedAdapters
from .parallel.zero import Slices


class TensorWeights(WholeFrozen, SpreadWeights):
    """The weights in one rank's slice of its part, in fp32; the decoder computes with the part, rounded."""

    def __init__(self, decoder: Decoder, weights: torch.Tensor, parts: TensorParts):
        """weights: the first master weights of the whole model, [parts.layout.numel] fp32."""
        self.decoder, self._parts = decoder, parts
        super().__init__(parts, Slices(parts.layout, parts.ranks, decoder.device))
        self._keep_frozen(weights)
        self._in_place = decoder.dtype == torch.float32
        self._master = self._own if self._in_place else parts.cut(weights)[parts.own.own].to(decoder.device)

    @property
    def _own(self) -> torch.Tensor:
        """This rank's slice of what is computed with."""
        return self.decoder.flat.detach()[self._parts.own.own]

    def _pieces_of(self, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The part of each weight in x, which has this rank's slice, by the weight's name."""
        place = self._parts.own.own
        for entry in self._parts.part.trained:
            first, last = max(entry.offset, place.start), min(entry.offset + entry.numel, place.stop)
            if first < last:
                yield entry.name, x[first - place.start : last - place.start]

    def pieces(self) -> Iterator[Piece]:
        start, shares_layers = 0, self._parts.sharing.rank > 0
        part, whole = self._parts.part.entries, self._parts.layout.entries
        for (name, weights), (_, rounded) in zip(
            self._pieces_of(self._master), self._pieces_of(self._own), strict=True
        ):
            place, start = slice(start, start + len(weights)), start + len(weights)
            yield Piece(
                weights,
                place,
                is_critic_head=name == VALUE_HEAD,
                rounded=None if self._in_place else rounded,
                matrices=[slice(0, len(weights))] if len(part[name].shape) > 1 else [],
                is_copy=shares_layers and part[name].shape == whole[name].shape,
            )

    def changed(self) -> int | None:
        self._parts.own.share(self.decoder.flat.detach())
        return None

    def collect(self) -> torch.Tensor | None:
        trained = self.slices.collect(self._own_slice())
        return None if trained is None else self._with_frozen(trained)

    def _own_slice(self) -> torch.Tensor:
        return self._slice_of(self._master)

    def hash_compute(self) -> Tree | None:
        if self._in_place:
            return None
        # They travel in fp32, which holds them exactly.
        own_slice = self._slice_of(self._own.float()).to(self.decoder.dtype)
        return self.slices.hash_tree(self.slices.hashing(own_slice))

    def whole_policy(self) -> tuple[Layout, torch.Tensor]:
        return self._parts.model(self.decoder.flat.detach())

    @torch.no_grad()
    def load(self, weights: torch.Tensor) -> None:
        """Replace all by this rank's part of `weights` [parts.layout.numel] fp32."""
        part = self._parts.cut(weights)
        self._keep_frozen(weights)
        self.decoder.flat.copy_(part)
        if not self._in_place:
            self._master.copy_(part[self._parts.own.own])

    def _slice_of(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole model, of what each rank has for its slice of its part."""
        return self._parts.to_slice(self._parts.vector(x))


class TensorAdapterWeights(AdapterWeights):
    """LoRA's adapters, whole in every rank; each rank computes with its part of the merged weights."""

    adapters: SharedAdapters

    def _merge(self) -> int | None:
        self.adapters.take()
        return super()._merge()

    def hash_compute(self) -> Tree | None:
        return self.adapters.hash_merged() if self._merges else None

    def whole_policy(self) -> tuple[Layout, torch.Tensor]:
        return self.adapters.layout.model, self.adapters.whole_policy()
