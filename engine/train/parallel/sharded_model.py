"""The model with its fp32 master weights spread over the ranks by FSDP2 (torch.distributed.fsdp).

Each rank keeps a piece of every Parameter: some of its rows. A layer's weights are whole only while the layer
computes, in the compute dtype. FSDP adds up the gradients of the ranks when a layer's backward has ended. It
does so by TreeReduceScatter: each rank sends every piece to its owner, and the owner adds what it got by the
lower levels of the tree of gradient.py. Virtual shard number j W + r is computed by rank r of W, in one
backward, in round j. A GradientTree over the rounds, of pieces, is the upper levels.

So 1, 2, 4 or 8 ranks build the same tree over the same leaves, and no rank ever holds a whole gradient.

Where ranks share layers (tensor.py), FSDP has the part of the model that its ranks have in common. Where they
share rows (ulysses.py), a rank has the gradient of some rows of a weight, and -0.0 elsewhere, which adds
nothing. Such ranks are neighbours: the tree's lowest levels put their parts together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import torch

from ....kernels.low_rank import LowRankBuffers
from ....kernels.shared_rows import SharedRows
from ....model.causal_lm import CausalLM
from ....model.decoder import Numerics
from ....model.weights import NONE_UNMERGED, UnmergedAdapters
from .data_parallel import RankedWorkers
from .gradient import OnePassWork
from .pieces import Pieces, WayToSlices, WholeRows, fill_pieces
from .process_group import Ranks
from .spread import Cutting

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

X = TypeVar("X")
Y = TypeVar("Y")


class ShardedModel:
    """A CausalLM whose Parameters FSDP has sharded, in fp32; and the rounds of its gradient.

    layout: of the whole model. pieces: where the rank's pieces lie in the part that it computes with. The
    gradient and the optimizer's state are flat over them, [pieces.numel]. way: from them to slices.
    """

    def __init__(
        self,
        folder: Path,
        cutting: Cutting,
        dtype: torch.dtype,
        numerics: Numerics,
        recompute: bool,
        ranks: Ranks,
        device: torch.device,
        adapters: Mapping[str, LowRankBuffers] = MappingProxyType({}),
        unmerged: UnmergedAdapters = NONE_UNMERGED,
    ):
        """Read this rank's pieces from a model's folder. dtype: of the computation.

        adapters, unmerged: see CausalLM.

        cutting: of the model along "tp". Raises ValueError (see read_rows).
        """
        self.layout, self.ranks, self.dtype, layout = cutting.layout, ranks, dtype, cutting.part
        options = {"numerics": numerics, "recompute": recompute, "layout": layout}
        options |= {"adapters": adapters, "unmerged": unmerged}
        self.model = CausalLM(layout.config, device="meta", **options)
        # torch takes two seconds to load its FSDP, and most runs have none.
        from .fsdp import apply_fsdp_with_tree

        self._comm = apply_fsdp_with_tree(self.model, ranks.replicas.mesh, dtype)
        self.model.to_empty(device=device)
        self._named = dict(self.model.named_parameters())
        self.pieces = Pieces(layout.trained, ranks.replicas)
        self._all_pieces = Pieces(layout.entries.values(), ranks.replicas)
        self.way = WayToSlices(cutting, self.pieces, ranks)
        self.rows = WholeRows(cutting, self.pieces, ranks)
        self._all_rows = WholeRows(cutting, self._all_pieces, ranks)
        self._shared = SharedRows(ranks.context_parallel)
        self.parameters = [self._named[part.name] for part in self.pieces.parts]
        self.read(folder)

    def read(self, folder: Path, beside: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """Read this rank's pieces from a model's folder; see read_parts."""
        fill_pieces(self._named, self._all_pieces.parts, self._all_rows.read(folder, beside))

    def locals(self) -> list[torch.Tensor]:
        """This rank's piece of each Parameter that is trained, in fp32."""
        return [p.detach().to_local() for p in self.parameters]

    def whole(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A Parameter, in every rank; or what has its shape and, in this rank, these rows.

        All ranks call this together.
        """
        like = self.by_name[name]
        return like.full_tensor() if rows is None else placed_like(like, rows.to(like.dtype)).full_tensor()

    @property
    def by_name(self) -> dict[str, "DTensor"]:
        """Every Parameter by its name in the checkpoint, in the flat tensor's order, without a graph."""
        return {part.name: self._named[part.name].detach() for part in self._all_pieces.parts}

    def master(self) -> torch.Tensor:
        """Copies of `locals`, [pieces.numel]."""
        return torch.cat([x.reshape(-1) for x in self.locals()])

    def tensors(self) -> "dict[str, DTensor]":
        """All tensors of the whole model, by name, of which each rank has rows. A call of all ranks."""
        if self.ranks.tensor_parallel.size == 1:
            return self.by_name
        return self._all_rows.tensors(torch.cat([x.to_local().reshape(-1) for x in self.by_name.values()]))

    def compute_round(self, work: OnePassWork, shards: Sequence[X | None]) -> tuple[list[Y | None], bool]:
        """Compute one virtual shard in each rank. None is a shard without sequences.

        Returns the results of all ranks, and whether this rank has a gradient that counts.
        """
        data, n = self.ranks.data_parallel, self._shared.size
        rank_shard = shards[data.rank]
        if not any(shard is not None for shard in shards):
            return list(shards), False
        # FSDP's ranks gather and add together, so a rank without a shard computes another's, for nothing.
        shard = rank_shard if rank_shard is not None else next(x for x in shards if x is not None)
        backward = any(shard is not None and work.has_gradient(shard) for shard in shards)
        has_gradient = backward and work.has_gradient(shard)
        present = [shard is not None for shard in shards for _ in range(n)]
        self._comm.begin(present, is_zero=not has_gradient)
        work = replace(work, shared=self._shared) if n > 1 else work
        result = work.one_pass(self.model, shard, backward)
        return data.gather(lambda: None if rank_shard is None else result), has_gradient

    def gather_into(self, flat: torch.Tensor) -> None:
        """Write the compute weights of all ranks to `flat` [layout.numel], rounded once to its dtype."""
        rank_pieces = [x.to_local().reshape(-1).to(flat.dtype) for x in self.by_name.values()]
        self._all_pieces.gather_into(flat, torch.cat(rank_pieces))


def placed_like(tensor: "DTensor", rows: torch.Tensor) -> "DTensor":
    """A tensor of the same shape and placement. rows: this rank's."""
    return type(tensor).from_local(
        rows.view(tensor.to_local().shape),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class ShardedWorkers(RankedWorkers):
    """RankedWorkers over a model that FSDP has sharded. In a round each rank computes one shard."""

    def __init__(self, model: ShardedModel, virtual_shards: int):
        super().__init__(model.ranks.data_parallel.size, virtual_shards)
        self._model = model

    def _sum_round(
        self, work: OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """The part of the gradient is of this rank's pieces."""
        model = self._model
        results, _ = model.compute_round(work, shards)
        present = [shard for shard in shards if shard is not None]
        if not present:
            return results, None
        if not any(map(work.has_gradient, present)):
            return results, torch.zeros(model.pieces.numel, device=model.parameters[0].device)
        gradient = torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters])
        model.model.zero_grad()
        return results, gradient

    def _slice_of(self, root: torch.Tensor | None) -> torch.Tensor | None:
        return None if root is None else self._model.way.to_gradient_slice(root)
