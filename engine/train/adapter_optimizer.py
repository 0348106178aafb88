"""The optimizer of a run that trains LoRA adapters (model/adapters.py) in place of the model's weights."""

from collections.abc import Iterator

import torch

from ...model.adapters import AdapterLayout, Adapters
from ...verify.ledger import Tree
from ..config.run_config import OptimizerConfig
from .optimizer import Optimizer
from .parallel.sharded_adapters import ShardedAdapters
from .parallel.tree_hash import hash_tree
from .parallel.zero import Slices


class AdapterOptimizer(Optimizer):
    """Owns the adapters, which are the fp32 master weights themselves, and the optimizer's state of them.

    After each update the decoder's weights are merged again. The gradient is that of the adapters
    (parallel/gradient.py).
    """

    def __init__(
        self,
        adapters: Adapters | ShardedAdapters,
        cfg: OptimizerConfig,
        total_updates: int,
        slices: Slices | None = None,
    ):
        """slices: of the adapters' layout. total_updates: see Optimizer."""
        self.adapters = adapters
        super().__init__(adapters.decoder, adapters.flat, cfg, total_updates, slices)

    @property
    def layout(self) -> AdapterLayout:
        """Of the adapters."""
        return self.adapters.layout

    @property
    def in_place(self) -> bool:
        """The adapters are fp32, whole in every rank, and nothing else holds them."""
        return True

    @property
    def _flat(self) -> torch.Tensor:
        return self.adapters.flat

    def load(self, weights: torch.Tensor, updates: int) -> None:
        """Replace the adapters by `weights` [layout.numel] fp32, and merge. updates: see Optimizer.load."""
        super().load(weights, updates)
        self.adapters.merge()

    def update(self, grad: torch.Tensor | None, loss_scale: float = 1.0) -> dict[str, float]:
        metrics = super().update(grad, loss_scale)
        self.adapters.merge()
        return metrics

    def whole_model(self) -> torch.Tensor:
        """The base with the adapters merged in, [decoder.layout.numel] fp32. It is a tensor of its own."""
        return self.adapters.merged()

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in the checkpoint and the fp32 values of each weight of the base."""
        return self.adapters.base_views()

    def hash_compute_weights(self) -> Tree:
        """The root of the hash tree of this rank's merged weights.

        It has no leaves, because the ledger's leaves are of A and B.
        """
        return Tree(hash_tree(self.decoder.layout.blocks, self.decoder.flat).root, [])
