"""The fp32 master weights of a run, in the pieces that a rank has; and what computes with them.

The optimizer changes the pieces and knows nothing else of them. Here are whole weights of which a rank owns
one slice, and LoRA adapters; sharded_weights.py has the rows that FSDP gives to a rank.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from ...model.adapters import Adapters
from ...model.compute_weights import quantise_all
from ...model.decoder import Decoder
from ...model.offload import HERE, Offload
from ...model.quantisation import Quantisation
from ...model.weights import VALUE_HEAD, FlatLayout, Layout
from ...verify.ledger import Tree
from .parallel.gathered import WholeWeights
from .parallel.pieces import WayToSlices
from .parallel.sharded_adapters import ShardedAdapters
from .parallel.spread import Spread
from .parallel.tree_hash import hash_tree
from .parallel.zero import Slices


@dataclass(frozen=True)
class Piece:
    """Some of a rank's master weights.

    place: of these n among all that the rank has, in a moment and in a gradient. rounded: where the compute
    weights lie; None where the weights themselves are computed with, or others round them.
    """

    weights: torch.Tensor  # [n] fp32
    place: slice
    is_critic_head: bool = False
    rounded: torch.Tensor | None = None  # [n] in the compute dtype
    offload: Offload = HERE  # where the weights lie
    matrices: Sequence[slice] = ()  # those of them that are matrices', which alone decay
    is_copy: bool = False  # another rank has them, too, and counts them

    def within(self, part: slice) -> slice:
        """A part of `place`, counted from its start."""
        return slice(part.start - self.place.start, part.stop - self.place.start)


def overlaps(places: Iterable[slice], within: slice) -> Iterator[slice]:
    """What lies of each place in `within`, counted from its start; nothing of the others."""
    for place in places:
        start, stop = max(place.start, within.start), min(place.stop, within.stop)
        if start < stop:
            yield slice(start - within.start, stop - within.start)


def in_place(places: Sequence[slice], within: slice) -> Iterator[tuple[int, slice]]:
    """What lies of each place in `within`, with the place's number. places: ascending, and apart."""
    for i in range(bisect_right(places, within.start, key=lambda place: place.stop), len(places)):
        start, stop = max(places[i].start, within.start), min(places[i].stop, within.stop)
        if places[i].start >= within.stop:
            return
        if start < stop:
            yield i, slice(start, stop)


class MasterWeights(ABC):
    """The master weights of one rank, whose optimizer updates `numel` of them.

    decoder: computes with all weights. slices: of what is trained, over the ranks; the norm and the ledger
    read gradient, moments and weights by them. Where something is sent, all ranks call a method together.
    """

    decoder: Decoder
    slices: Slices

    @property
    def layout(self) -> FlatLayout:
        """Of all that is trained, and of the frozen weights after it."""
        return self.slices.layout

    @property
    def spread(self) -> Spread:
        """What of the trained weights each rank has."""
        return self.slices

    @property
    def numel(self) -> int:
        """Those that are trained in this rank."""
        return self.spread.numel

    @property
    def computed_numel(self) -> int:
        """The weights, of all ranks, that what is trained makes to compute with."""
        return sum(entry.numel for entry in self.layout.trained)

    @property
    def compute_dtype(self) -> torch.dtype:
        """That the pieces are rounded to before anything computes with them."""
        return self.decoder.dtype

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Where they lie."""

    @abstractmethod
    def changed(self) -> int | None:
        """Bring what computes up to date, in all ranks, after the pieces have changed.

        Returns how many weights compute with other bits than before, of all ranks; None where these are the
        pieces that have other bits once they are rounded.
        """

    def swallowed(self) -> dict[int, tuple[float, float]]:
        """By the layer, what rounding swallows of LoRA's adapters, and their whole: sums of |s B A|.

        Swallowed is what is added to weights that are still what the base rounds to. Empty without LoRA.
        """
        return {}

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's slice of what has an element [numel] for each weight."""
        return vector

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        """What to_slice was given, from the slice; what follows in either does not count."""
        return own_slice

    @abstractmethod
    def collect(self) -> torch.Tensor | None:
        """All weights, [layout.numel] fp32, at least in rank 0. The next update may change this tensor."""

    @abstractmethod
    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in the checkpoint and the fp32 values of each weight of the model that is not trained."""

    @abstractmethod
    def hash(self) -> Tree:
        """The hash tree of what is trained."""

    @abstractmethod
    def hash_compute(self) -> Tree | None:
        """That of the compute weights; None where they are the master weights."""

    def gathered(self) -> AbstractContextManager[None]:
        """Inside this context the decoder has all its weights."""
        return nullcontext()

    def whole_policy(self) -> tuple[Layout, torch.Tensor]:
        """The layout of the whole model, and what is computed with, [numel]. Called inside `gathered`."""
        return self.decoder.layout, self.decoder.flat.detach()


class WholeFrozen(MasterWeights):
    """Master weights beside which each rank keeps all frozen weights, in fp32."""

    def _keep_frozen(self, weights: torch.Tensor) -> None:
        """Keep the frozen part of `weights` [layout.numel], on the host: nothing computes with it."""
        self._frozen = weights[self.layout.trained_numel :].to("cpu", copy=True)

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.layout.frozen_views(self._frozen).items()

    def _with_frozen(self, trained: torch.Tensor) -> torch.Tensor:
        """The trained weights with the frozen ones after them, [layout.numel]."""
        frozen = self._frozen.to(trained.device)
        return torch.cat([trained, frozen]) if len(frozen) else trained


class SpreadWeights(MasterWeights):
    """Weights of which a rank has others than its slice. way: from these to the slices, and back."""

    def __init__(self, way: WayToSlices, slices: Slices):
        self._way, self.slices = way, slices

    @property
    def spread(self) -> Spread:
        return self._way

    def to_slice(self, vector: torch.Tensor) -> torch.Tensor:
        return self._way.to_slice(vector)

    def from_slice(self, own_slice: torch.Tensor) -> torch.Tensor:
        place = self.slices.own
        return self._way.from_slice(own_slice[: place.stop - place.start].to(self.decoder.device))

    def hash(self) -> Tree:
        return self.slices.hash_tree(self.slices.hashing(self._own_slice()))

    @abstractmethod
    def _own_slice(self) -> torch.Tensor:
        """This rank's slice of the master weights."""


class SlicedWeights(WholeFrozen):
    """A decoder's weights, whole in every rank. `master` [numel] is this rank's slice of them, in fp32."""

    def __init__(
        self,
        decoder: Decoder,
        weights: torch.Tensor,
        slices: Slices | None = None,
        quantisation: Quantisation | None = None,
    ):
        """weights: the first master weights, [layout.numel] fp32. They are not read if `in_place`.

        slices: None is one rank. quantisation: of the weights that the decoder computes with, from now on;
        None leaves them as they are.
        """
        self.decoder, self._quantisation = decoder, quantisation
        self.slices = slices or Slices(decoder.layout)
        place = self.slices.own
        self.master = self._flat[place] if self.in_place else self._kept(weights[place])
        self._keep_frozen(weights)
        matrices = [e for e in self.layout.trained if len(e.shape) > 1]
        self._matrices = list(overlaps([slice(e.offset, e.offset + e.numel) for e in matrices], place))
        heads = [e.offset for e in self.layout.trained if e.name == VALUE_HEAD]
        # A critic's head is the last weight.
        self._head = min(max(heads[0] - place.start, 0), self.numel) if heads else self.numel
        self._quantise(self.layout.checkpoint_views)

    def _kept(self, weights: torch.Tensor) -> torch.Tensor:
        return self.decoder.offload.copied(weights, self.decoder.device, torch.float32)

    @property
    def in_place(self) -> bool:
        """Whether they lie in `_flat` itself: those of an fp32 decoder are its weights, if not quantised."""
        return self.decoder.dtype == torch.float32 and self._quantisation is None

    @property
    def _flat(self) -> torch.Tensor:
        """What the master weights give, whole in every rank, [layout.numel]: the compute weights."""
        return self.decoder.flat.detach()

    def pieces(self) -> Iterator[Piece]:
        rounded = None if self.in_place else self._flat[self.slices.own]
        for place, is_head in ((slice(0, self._head), False), (slice(self._head, self.numel), True)):
            if place.start < place.stop:
                matrices = list(overlaps(self._matrices, place))
                if rounded is None:
                    yield Piece(self.master[place], place, is_head, matrices=matrices)
                else:
                    where = rounded[place], self.decoder.offload
                    yield Piece(self.master[place], place, is_head, *where, matrices)

    def changed(self) -> int | None:
        self.slices.share(self._flat)
        self._quantise(self.layout.trained_views)
        return None

    def _quantise(self, views: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> None:
        """Quantise compute weights that were just rounded from the master weights, whole in every rank.

        views: gives those of a flat tensor by their names in a checkpoint.
        """
        if self._quantisation is not None:
            quantise_all(views(self._flat), self._quantisation)

    @torch.no_grad()
    def load(self, weights: torch.Tensor) -> None:
        """Replace all by `weights` [layout.numel] fp32, in every rank."""
        self._flat.copy_(weights)
        if not self.in_place:
            self.master.copy_(weights[self.slices.own])
            self._keep_frozen(weights)
        self._quantise(self.layout.checkpoint_views)

    def whole(self) -> torch.Tensor:
        """As `collect`, in every rank."""
        return (
            self._flat
            if self.in_place
            else self._with_frozen(self.slices.everywhere(self.master.to(self.decoder.device)))
        )

    def whole_model(self) -> torch.Tensor:
        """The model that they make, [decoder.layout.numel] fp32, in every rank."""
        return self.whole()

    def collect(self) -> torch.Tensor | None:
        if self.in_place:
            return self._flat
        trained = self.slices.collect(self.master)
        return None if trained is None else self._with_frozen(trained)

    def _keep_frozen(self, weights: torch.Tensor) -> None:
        if self.in_place:
            self._frozen = self._flat[self.layout.trained_numel :]
        else:
            super()._keep_frozen(weights)

    def hash(self) -> Tree:
        if self.in_place:  # the hash is of this rank's copy, so that ranks with different copies are found
            return hash_tree(self.layout.blocks, self._flat)
        return self.slices.hash_tree(self.slices.hashing(self.master))

    def hash_compute(self) -> Tree | None:
        """Of this rank's copy."""
        return None if self.in_place else hash_tree(self.layout.blocks, self._flat)


class AdapterWeights(SlicedWeights):
    """LoRA adapters (model/adapters.py), in fp32 and whole in every rank; and what they belong to.

    whole: of a base that is spread over the ranks; None where it is whole in every rank.
    """

    in_place = True

    def __init__(
        self,
        adapters: Adapters | ShardedAdapters,
        slices: Slices | None = None,
        whole: WholeWeights | None = None,
    ):
        """slices: of the adapters' layout."""
        self.adapters, self._gathers = adapters, whole
        super().__init__(adapters.decoder, adapters.flat, slices or Slices(adapters.layout))

    @property
    def _flat(self) -> torch.Tensor:
        return self.adapters.flat

    @property
    def _merges(self) -> bool:
        return self.adapters.layout.lora.merge

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def computed_numel(self) -> int:
        if not self._merges:
            return super().computed_numel
        adapters = self.adapters.layout.adapters
        return sum((x.rows.stop - x.rows.start) * x.weight.shape[-1] for x in adapters)

    def changed(self) -> int | None:
        super().changed()
        return self._merge()

    def _merge(self) -> int | None:
        """Let the decoder compute with the adapters as they are now. Returns what `changed` does."""
        return self.adapters.merge() if self._merges else None

    def swallowed(self) -> dict[int, tuple[float, float]]:
        if not self._merges:
            return {}
        by_layer: dict[int, list[np.ndarray]] = {}
        for layer, rows in self.adapters.swallowed():
            by_layer.setdefault(layer, []).append(rows)
        sums = {layer: np.concatenate(rows).T.tolist() for layer, rows in sorted(by_layer.items())}
        return {layer: (math.fsum(lost), math.fsum(whole)) for layer, (lost, whole) in sums.items()}

    def load(self, weights: torch.Tensor) -> None:
        super().load(weights)
        self._merge()

    def whole_model(self) -> torch.Tensor:
        """The base with the adapters merged in. It is a tensor of its own."""
        return self.adapters.merged()

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the base."""
        return self.adapters.base_views()

    def hash_compute(self) -> Tree | None:
        """The root of the merged weights' tree. It has no leaves, because the ledger's are of A and B.

        None where nothing is merged: the base does not change, and the ledger's head has it.
        """
        if not self._merges:
            return None
        if self._gathers:
            return self.adapters.hash_merged()
        return Tree(hash_tree(self.decoder.layout.blocks, self.decoder.flat).root, [])

    def gathered(self) -> AbstractContextManager[None]:
        return self._gathers.gathered() if self._gathers else nullcontext()
