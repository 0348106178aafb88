"""What the operations of one forward and its backward share, beside their operands.

A pass may hold the rows of several virtual shards. Its token blocks say which rows belong to which shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from .grad import GradBuffer
from .low_rank import LowRankBuffers
from .order import TokenBlocks, token_blocks
from .shared_rows import ALL_ROWS, SharedRows


@dataclass(frozen=True)
class Pass:
    """The token blocks of the rows, and by weight the buffers of gradients and the packed copies.

    Weights are found by identity. A weight without a buffer has its gradient returned to autograd. A weight
    of `linear` may have the buffers of its LoRA adapters in place of its own. A weight without a packed copy
    is read itself (matmul.pack_weights). Where ranks share the rows, the blocks count the rows of all, and a
    buffer has this rank's part of its weight; without one, the gradient has it among zeros.
    """

    blocks: TokenBlocks | None = None  # None: all rows are one sequence
    buffers: Mapping[torch.Tensor, GradBuffer | LowRankBuffers] = field(default_factory=dict)
    packed: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    shared: SharedRows = ALL_ROWS

    def over(self, x: torch.Tensor) -> "Pass":
        """This pass over the rows of x [T, ...]: its blocks are never None. Only a backward needs them."""
        return self if self.blocks is not None else replace(self, blocks=token_blocks([x.shape[0]]))

    def buffer(self, weight: torch.Tensor) -> GradBuffer | LowRankBuffers:
        """The buffer of the weight's gradient: the pass's, or a new one that is empty."""
        buffer = self.buffers.get(weight)
        return GradBuffer.like(self.shared.mine(weight)) if buffer is None else buffer

    def returned_grad(self, weight: torch.Tensor, buffer: GradBuffer | LowRankBuffers) -> torch.Tensor | None:
        """What a backward function returns for `weight`, after it has added to `buffer`.

        The sum of a new buffer is rounded once to the weight's dtype. A leaf may ask for another one
        (torch.Tensor.grad_dtype): a Parameter with fp32 gets the sum as it is.
        """
        if self.buffers.get(weight) is buffer:
            return None
        grad = buffer.zeroed([0])[0].to((weight.is_leaf and weight.grad_dtype) or weight.dtype)
        return self.shared.among_zeros(grad)


ONE_SEQUENCE = Pass()
