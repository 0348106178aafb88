"""The optimizer of a model that FSDP has sharded.

Master weights and moments lie in this rank's pieces (parallel/pieces.py). The gradient comes in the slices of
parallel/zero.py, where the norm and the ledger read it, and goes back to the pieces for AdamW. AdamW works
element by element, so where an element lies decides no bit.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from ...kernels.adamw import AdamW, adamw
from ...model.decoder import Decoder
from ...verify.ledger import Tree
from ..config import OptimizerConfig
from ..parallel.sharded_model import ShardedModel, WholeWeights
from ..parallel.zero import Slices
from .optimizer import GPU_SLICE, SLICE, Optimizer


class ShardedOptimizer(Optimizer):
    """See Optimizer. `moments` are this rank's pieces, [pieces.numel] fp32 each.

    decoder: the sampler's, which has its weights only while it draws (whole).
    """

    def __init__(
        self,
        model: ShardedModel,
        decoder: Decoder,
        whole: WholeWeights,
        cfg: OptimizerConfig,
        total_updates: int,
    ):
        self._model, self._pieces, self._whole = model, model.pieces, whole
        self.decoder, self.cfg, self.total_updates = decoder, cfg, total_updates
        device = decoder.device
        self.slices = Slices(self.layout, model.ranks, device)
        zeros = (torch.zeros(self._pieces.numel, device=device) for _ in range(2))
        self.moments = tuple(zeros)
        self.updates, self._slice = 0, GPU_SLICE if device.type == "cuda" else SLICE

    @property
    def in_place(self) -> bool:
        """The master weights lie in no flat tensor."""
        return False

    @property
    def _frozen_part(self) -> torch.Tensor:
        return torch.empty(0)

    @torch.no_grad()
    def load(self, weights: torch.Tensor, updates: int) -> None:
        """See Optimizer. Every rank is given all of them."""
        self.updates = updates
        self._model.fill({p.name: weights[p.start : p.stop].view(-1) for p in self._pieces.parts})

    def begin_after(self, updates: int) -> None:
        """Say how many updates the weights have had, which are read into this rank's own rows."""
        self.updates = updates

    @torch.no_grad()
    def load_moments(self, moments: Sequence[torch.Tensor]) -> None:
        """See Optimizer."""
        super().load_moments([self._pieces.from_slice(own.to(self.decoder.device)) for own in moments])

    def whole_master(self) -> torch.Tensor:
        """See Optimizer."""
        return self.slices.everywhere(self._master_slice())

    def collect_master(self) -> torch.Tensor | None:
        """See Optimizer."""
        return self.slices.collect(self._master_slice())

    def collect_moments(self) -> list[torch.Tensor | None]:
        """See Optimizer."""
        return [self.slices.collect(self._pieces.to_slice(moment)) for moment in self.moments]

    def hash_moments(self) -> Tree:
        """See Optimizer."""
        return self.slices.hash_tree(self.slices.hashing(*map(self._pieces.to_slice, self.moments)))

    def hash_weights(self) -> Tree:
        """See Optimizer."""
        return self.slices.hash_tree(self.slices.hashing(self._master_slice()))

    def hash_compute_weights(self) -> Tree | None:
        """See Optimizer. What a layer computes with is the master weights, rounded once."""
        if self.decoder.dtype == torch.float32:
            return None
        rounded = self._master_slice().to(self.decoder.dtype)
        return self.slices.hash_tree(self.slices.hashing(rounded))

    def master_tensors(self) -> dict[str, DTensor]:
        """The master weights over all ranks, by their names in the checkpoint; of this rank its rows."""
        names = (part.name for part in self._pieces.parts)
        return {name: p.detach() for name, p in zip(names, self._model.parameters, strict=True)}

    def moment_tensors(self) -> list[dict[str, DTensor]]:
        """The same of each moment. They share its memory."""
        return [self._placed(moment) for moment in self.moments]

    def _placed(self, vector: torch.Tensor) -> dict[str, DTensor]:
        parts = zip(self._pieces.split(vector), self.master_tensors().items(), strict=True)
        return {
            name: DTensor.from_local(
                local.view(like.to_local().shape),
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
            for local, (name, like) in parts
        }

    def whole_policy(self) -> AbstractContextManager[None]:
        """See Optimizer."""
        return self._whole.gathered()

    def _master_slice(self) -> torch.Tensor:
        """This rank's slice of the master weights."""
        return self._pieces.to_slice(self._model.master())

    def _decay(self, factor: float) -> None:
        for part, local in zip(self._pieces.parts, self._model.locals(), strict=True):
            if part.dim > 1:
                local.mul_(factor)

    def _adamw(self, grad: torch.Tensor, numbers: AdamW) -> None:
        own = self.slices.own
        of_parts = map(
            self._pieces.split, (*self.moments, self._pieces.from_slice(grad[: own.stop - own.start]))
        )
        for local, m, v, g in zip(self._model.locals(), *of_parts, strict=True):
            if local.numel():
                adamw(local.view(-1), m, v, g, numbers)
