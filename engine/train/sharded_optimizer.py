"""The optimizer of a model that FSDP has sharded.

Master weights and moments lie in this rank's pieces (parallel/pieces.py). The gradient comes in the slices of
parallel/zero.py, where the norm and the ledger read it, and goes back to the pieces for AdamW. AdamW works
element by element, so where an element lies decides no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ...kernels.adamw import AdamW, adamw
from ...model.weights import VALUE_HEAD_TENSOR
from ...verify.ledger import Tree
from ..config.run_config import OptimizerConfig
from .adapter_optimizer import AdapterOptimizer
from .optimizer import GPU_SLICE, SLICE, Optimizer
from .parallel.gathered import WholeWeights
from .parallel.sharded_adapters import ShardedAdapters
from .parallel.sharded_model import ShardedModel, placed_like
from .parallel.zero import Slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedOptimizer(Optimizer):
    """An Optimizer of spread weights. `moments` are this rank's pieces, [pieces.numel] fp32 each.

    whole: of the model. Its decoder is the sampler's, and has its weights only while it draws.
    """

    def __init__(self, model: ShardedModel, whole: WholeWeights, cfg: OptimizerConfig, total_updates: int):
        self._model, self._pieces, self._whole = model, model.pieces, whole
        self.decoder, self.cfg, self.total_updates = whole.decoder, cfg, total_updates
        device = self.decoder.device
        self.slices = Slices(self.layout, model.ranks, device)
        zeros = (torch.zeros(self._pieces.numel, device=device) for _ in range(2))
        self.moments = tuple(zeros)
        self.updates, self._slice = 0, GPU_SLICE if device.type == "cuda" else SLICE

    @property
    def in_place(self) -> bool:
        """The master weights lie in no flat tensor."""
        return False

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All ranks iterate together: each weight is gathered in its turn."""
        frozen = set(self._model.by_name) - {part.name for part in self._pieces.parts}
        for name, tensor in self._model.by_name.items():
            if name in frozen:
                yield name, tensor.full_tensor().cpu()

    @torch.no_grad()
    def load(self, weights: torch.Tensor, updates: int) -> None:
        """Every rank is given all of them."""
        self.updates = updates
        self._model.load(weights)

    def begin_after(self, updates: int) -> None:
        """Say how many updates the weights have had, which are read into this rank's own rows."""
        self.updates = updates

    @torch.no_grad()
    def load_moments(self, moments: Sequence[torch.Tensor]) -> None:
        super().load_moments([self._pieces.from_slice(moment.to(self.decoder.device)) for moment in moments])

    def whole_master(self) -> torch.Tensor:
        flat = torch.zeros(self.layout.numel, device=self.decoder.device)
        self._model.gather_into(flat)
        return flat

    def collect_master(self) -> torch.Tensor | None:
        trained, frozen = self.slices.collect(self._master_slice()), self._collect_frozen()
        return None if trained is None else torch.cat([trained, frozen.to(trained.device)])

    def _collect_frozen(self) -> torch.Tensor:
        """The weights that are not trained, [layout.numel - layout.trained_numel] fp32, in rank 0 alone."""
        numel = (self.layout.numel - self.layout.trained_numel) * self.slices.ranks.first
        flat = torch.zeros(numel)
        views = self.layout.frozen_views(flat) if numel else {}
        for name, weight in self.frozen_views():
            if views:
                views[name].copy_(weight)
        return flat

    def collect_moments(self) -> list[torch.Tensor | None]:
        return [self.slices.collect(self._pieces.to_slice(moment)) for moment in self.moments]

    def hash_moments(self) -> Tree:
        return self.slices.hash_tree(self.slices.hashing(*map(self._pieces.to_slice, self.moments)))

    def hash_weights(self) -> Tree:
        return self.slices.hash_tree(self.slices.hashing(self._master_slice()))

    def hash_compute_weights(self) -> Tree | None:
        """What a layer computes with is the master weights, rounded once."""
        if self.decoder.dtype == torch.float32:
            return None
        rounded = self._master_slice().to(self.decoder.dtype)
        return self.slices.hash_tree(self.slices.hashing(rounded))

    def master_tensors(self) -> dict[str, "DTensor"]:
        """All weights over all ranks, by their names in the checkpoint; of this rank its rows."""
        return {name: x for name, x in self._model.by_name.items() if name != VALUE_HEAD_TENSOR}

    def collect_beside(self) -> dict[str, torch.Tensor]:
        """What is trained and is no tensor of the checkpoint, a critic's head, whole in every rank.

        All ranks call this together.
        """
        head = self._model.by_name.get(VALUE_HEAD_TENSOR)
        return {} if head is None else {VALUE_HEAD_TENSOR: head.full_tensor()}

    @torch.no_grad()
    def load_beside(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what collect_beside gave."""
        for part, local in zip(self._pieces.parts, self._model.locals(), strict=True):
            if part.name in tensors:
                local.copy_(tensors[part.name][part.rows])

    def moment_tensors(self) -> list[dict[str, "DTensor"]]:
        """The same of each moment, for what is trained. They share its memory."""
        return [self._placed(moment) for moment in self.moments]

    def _placed(self, vector: torch.Tensor) -> dict[str, "DTensor"]:
        like = self._model.by_name
        parts = zip(self._pieces.parts, self._pieces.split(vector), strict=True)
        return {part.name: placed_like(like[part.name], local) for part, local in parts}

    def whole_policy(self) -> AbstractContextManager[None]:
        return self._whole.gathered()

    def _master_slice(self) -> torch.Tensor:
        """This rank's slice of the master weights."""
        return self._pieces.to_slice(self._model.master())

    def _decay(self, factor: float) -> None:
        for part, local in zip(self._pieces.parts, self._model.locals(), strict=True):
            if part.dim > 1:
                local.mul_(factor)

    def _adamw(self, grad: torch.Tensor, numbers: AdamW) -> None:
        place = self.slices.own
        split_vectors = map(
            self._pieces.split, (*self.moments, self._pieces.from_slice(grad[: place.stop - place.start]))
        )
        parts, head_numbers = self._pieces.parts, numbers._replace(lr=numbers.lr * self.cfg.critic_lr_ratio)
        for part, local, m, v, g in zip(parts, self._model.locals(), *split_vectors, strict=True):
            if local.numel():
                adamw(local.view(-1), m, v, g, head_numbers if part.name == VALUE_HEAD_TENSOR else numbers)


class ShardedAdapterOptimizer(AdapterOptimizer):
    """An AdapterOptimizer: A and B are whole in every rank; what they are merged into is spread."""

    def __init__(
        self,
        adapters: ShardedAdapters,
        whole: WholeWeights,
        cfg: OptimizerConfig,
        total_updates: int,
        slices: Slices,
    ):
        """slices: of the adapters' layout."""
        super().__init__(adapters, cfg, total_updates, slices)
        self._whole = whole

    def hash_compute_weights(self) -> Tree:
        """All ranks call this together."""
        return self.adapters.hash_merged()

    def whole_policy(self) -> AbstractContextManager[None]:
        return self._whole.gathered()
