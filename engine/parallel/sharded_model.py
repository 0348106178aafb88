"""The model with its fp32 master weights spread over the ranks by FSDP2 (torch.distributed.fsdp).

Each rank keeps a piece of every Parameter: some of its rows. A layer's weights are whole only while the layer
computes, in the compute dtype. FSDP adds up the gradients of the ranks when a layer's backward has ended. It
does so by TreeReduceScatter: each rank sends every piece to its owner, and the owner adds what it got by the
lower levels of the tree of gradient.py. Virtual shard number j W + r is computed by rank r of W, in one
backward, in round j. A GradientTree over the rounds, of pieces, is the upper levels.

So 1, 2, 4 or 8 ranks build the same tree over the same leaves, and no rank ever holds a whole gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

# FSDPModule.set_custom_reduce_scatter takes an object of this class, and no public module has it.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ...kernels.sampling_params import SamplingParams
from ...model.causal_lm import CausalLM
from ...model.checkpoint import read_rows
from ...model.decoder import Decoder, Numerics
from ...model.weights import Layout
from ..rollout.types import Completion, Request, Rollout
from .gradient import GradientTree, add_roots
from .pieces import Part, Pieces
from .process_group import Ranks
from .scorer import WorkersSampler

X = TypeVar("X")
Y = TypeVar("Y")


class OnePassWork(Protocol[X, Y]):
    """The work of one virtual shard in one forward and one backward."""

    def has_gradient(self, shard: X) -> bool:
        """Whether the loss of this shard has a gradient."""
        ...

    def one_pass(self, model: CausalLM, shard: X, backward: bool) -> Y:
        """Its forward and, if asked for, its backward. The gradients are then in the Parameters' .grad."""
        ...


class TreeReduceScatter(ReduceScatter):
    """A reduce-scatter that adds neighbouring ranks pairwise, in fp32.

    present: which ranks have a shard in this round. A rank without one adds nothing; zeros would change bits,
    because -0.0 + 0.0 is not -0.0. is_zero: whether this rank's gradient counts as zeros.
    """

    def __init__(self) -> None:
        self.begin([], is_zero=False)

    def begin(self, present: list[bool], is_zero: bool) -> None:
        """Say of the round that comes what the class's text says."""
        self.present, self.is_zero = present, is_zero

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See torch's Comm."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum input_tensor [W n] of all ranks; output_tensor [n] is this rank's part."""
        assert op == dist.ReduceOp.SUM, f"FSDP wants {op}, which is no sum"
        assert input_tensor.dtype == torch.float32, f"a gradient was rounded to {input_tensor.dtype}"
        if self.is_zero:
            input_tensor.zero_()
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(len(self.present), -1).unbind(0)
        output_tensor.copy_(
            add_roots([x if has else None for x, has in zip(parts, self.present, strict=True)])
        )


def apply_fsdp(
    model: CausalLM,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    offload_policy: OffloadPolicy | None = None,
) -> list[FSDPModule]:
    """Let FSDP shard every layer, and the rest together: tied embeddings are one Parameter of it.

    dtype: of the computation; gradients are fp32. Returns the modules that FSDP has made its own.
    """
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    modules = (*model.model.layers, model)
    for module in modules:
        # The last of them too: a forward without a backward would leave it whole, and stale.
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload_policy or OffloadPolicy(),
            reshard_after_forward=True,
        )
    return list(modules)


@torch.no_grad()
def read_pieces(model: CausalLM, folder: Path, layout: Layout, parts: Sequence[Part]) -> None:
    """Set a rank's pieces, which FSDP has sharded, from a model's folder. Raises ValueError.

    parts: of this rank (parts_of).
    """
    named = dict(model.named_parameters())
    rows = read_rows(folder, layout, {part.name: part.rows for part in parts})
    for part in parts:
        local = named[part.name].detach().to_local()
        local.copy_(rows[part.name].view(local.shape))


class ShardedModel:
    """A CausalLM whose Parameters FSDP has sharded, in fp32; and the rounds of its gradient.

    pieces: where the rank's pieces lie. The gradient and the optimizer's state are flat over them,
    [pieces.numel].
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        dtype: torch.dtype,
        numerics: Numerics,
        recompute: bool,
        ranks: Ranks,
        device: torch.device,
    ):
        """Read this rank's pieces from a model's folder. dtype: of the computation. Raises ValueError."""
        self.layout, self.ranks, self.dtype = layout, ranks, dtype
        self.model = CausalLM(layout.config, device="meta", numerics=numerics, recompute=recompute)
        self._comm = TreeReduceScatter()
        for module in apply_fsdp(self.model, self.ranks.mesh, self.dtype):
            module.set_custom_reduce_scatter(self._comm)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(self.model, "score_inputs")
        self.model.to_empty(device=device)
        named = dict(self.model.named_parameters())
        self.pieces = Pieces(layout, ranks)
        self.parameters = [named[part.name] for part in self.pieces.parts]
        read_pieces(self.model, folder, layout, self.pieces.parts)

    @torch.no_grad()
    def fill(self, rows: dict[str, torch.Tensor]) -> None:
        """Set this rank's pieces. rows: of each Parameter, by its name."""
        for part, local in zip(self.pieces.parts, self.locals(), strict=True):
            local.copy_(rows[part.name].view(local.shape))

    def locals(self) -> list[torch.Tensor]:
        """This rank's piece of each Parameter, in fp32."""
        return [p.detach().to_local() for p in self.parameters]

    def master(self) -> torch.Tensor:
        """A copy of all of them, [pieces.numel]."""
        return torch.cat([x.reshape(-1) for x in self.locals()])

    def sum_round(
        self, work: OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """Compute one virtual shard in each rank. None is a shard without sequences.

        Returns the results of all, and this rank's pieces of the gradients' sum; None where no rank has one.
        """
        present = [shard is not None for shard in shards]
        if not any(present):
            return list(shards), None
        own = shards[self.ranks.rank]
        # FSDP's ranks gather and add together, so a rank without a shard computes another's, for nothing.
        shard = own if own is not None else next(x for x in shards if x is not None)
        backward = any(shard is not None and work.has_gradient(shard) for shard in shards)
        self._comm.begin(present, is_zero=not work.has_gradient(shard))
        result = work.one_pass(self.model, shard, backward)
        results = self.ranks.gather(lambda: None if own is None else result)
        if not backward:
            return results, torch.zeros(self.pieces.numel, device=self.parameters[0].device)
        gradient = torch.cat([p.grad.to_local().reshape(-1) for p in self.parameters])
        self.model.zero_grad()
        return results, gradient

    @torch.no_grad()
    def gather_into(self, flat: torch.Tensor) -> None:
        """Write the compute weights of all ranks to `flat` [layout.numel], rounded once to its dtype."""
        own = self.master().to(flat.dtype)
        for rank in range(self.ranks.size):
            ranges = self.pieces.ranges(rank)
            n = sum(b - a for a, b in ranges)
            piece = own if rank == self.ranks.rank else own.new_empty(n)
            if self.ranks.size > 1 and n:
                self.ranks.broadcast(piece.view(torch.uint8), rank)  # gloo does not know every dtype
            start = 0
            for a, b in ranges:
                flat[a:b] = piece[start : start + b - a]
                start += b - a


class ShardedWorkers:
    """The interface of Workers, as far as training needs it, for a model that FSDP has sharded.

    The gradient is this rank's part in the slices of zero.py, for the norm and the ledger.
    """

    n = 1

    def __init__(self, model: ShardedModel, virtual_shards: int):
        self._model = model
        self._tree = GradientTree(virtual_shards // model.ranks.size)

    def own_threads(self) -> AbstractContextManager[None]:
        """See Workers: there is one worker."""
        return nullcontext()

    def sum_shards(
        self, work: OnePassWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """See RankedWorkers.sum_shards."""
        results: list[Y | None] = []
        size = self._model.ranks.size
        for first in range(0, len(shards), size):
            of_round, gradient = self._model.sum_round(work, shards[first : first + size])
            results += of_round
            self._tree.push(gradient)
        root = self._tree.take()
        return results, None if root is None else self._model.pieces.to_gradient_slice(root)

    def close(self) -> None:
        """Nothing runs outside this process."""


class WholeWeights:
    """The whole copy of the weights that a sampler draws with. Its memory exists only while it draws."""

    def __init__(self, model: ShardedModel, decoder: Decoder):
        """decoder: over a flat tensor of zeros, whose memory is freed."""
        self._model, self._decoder = model, decoder
        self._bytes = decoder.flat.nbytes
        decoder.flat.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside this context the decoder has the weights. All ranks must enter it together."""
        flat = self._decoder.flat.detach()
        flat.untyped_storage().resize_(self._bytes)
        flat.zero_()
        self._model.gather_into(flat)
        try:
            yield
        finally:
            flat.untyped_storage().resize_(0)


class GatheredSampler:
    """A sampler over whole weights, which are gathered for each of its calls. All ranks call it together."""

    def __init__(self, sampler: WorkersSampler, whole: WholeWeights):
        self._sampler, self._whole = sampler, whole

    @property
    def samples_at_once(self) -> int:
        """See Sampler."""
        return self._sampler.samples_at_once

    @property
    def version(self) -> int:
        """See ScoringSampler."""
        return self._sampler.version

    def sync_weights(self, version: int) -> None:
        """See Sampler."""
        self._sampler.sync_weights(version)

    def end_turns(self) -> None:
        """See Sampler."""
        self._sampler.end_turns()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Sampler."""
        with self._whole.gathered():
            return self._sampler.generate(requests)

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """See ScoringSampler."""
        with self._whole.gathered():
            return self._sampler.score(rollouts, sampling_params)

    def close(self) -> None:
        """Nothing runs outside this process."""
