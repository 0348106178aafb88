"""FSDP2 (torch.distributed.fsdp) around a CausalLM, and a reduce-scatter whose sum is a tree.

Only what shards imports this file: torch takes two seconds to load its FSDP.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

from ....model.causal_lm import CausalLM
from ....model.weights import Layout
from .gradient import tree_reduce_scatter
from .pieces import fill_pieces, parts_of, read_parts


class TreeReduceScatter(ReduceScatter):
    """A reduce-scatter that adds neighbouring ranks pairwise, in fp32.

    present: which ranks have a shard in this round (see tree_reduce_scatter). is_zero: whether this rank's
    gradient counts as zeros.
    """

    def __init__(self) -> None:
        self.begin([], is_zero=False)

    def begin(self, present: list[bool], is_zero: bool) -> None:
        """Say of the round that comes what the class's text says."""
        self.present, self.is_zero = present, is_zero

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
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
        lengths = [output_tensor.numel()] * len(self.present)
        output_tensor.copy_(tree_reduce_scatter(group, input_tensor.view(-1), lengths, self.present))


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


def apply_fsdp_with_tree(model: CausalLM, mesh: DeviceMesh, dtype: torch.dtype) -> TreeReduceScatter:
    """apply_fsdp, with gradients that are summed by the tree. Its `begin` is called before each backward."""
    tree = TreeReduceScatter()
    for module in apply_fsdp(model, mesh, dtype):
        module.set_custom_reduce_scatter(tree)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "score_inputs")
    return tree


def read_pieces(model: CausalLM, folder: Path, layout: Layout, mesh: DeviceMesh) -> None:
    """Set this rank's pieces of a model that FSDP has sharded, from a model's folder. Raises ValueError."""
    parts = parts_of(layout.entries.values(), mesh.get_local_rank(), mesh.size())
    fill_pieces(dict(model.named_parameters()), parts, read_parts(parts, folder, layout))
