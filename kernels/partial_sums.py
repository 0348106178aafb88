"""What waits to be added to the sums of a weight's gradient on a GPU."""

from typing import NamedTuple

import torch

from .order import TokenBlocks


class PartialSums(NamedTuple):
    """Partial sums [runs, D] in fp32 of a weight's gradient on a GPU, and where they are to be added.

    sums [shards, D]; blocks and rows: see columns_triton.add_partials.
    """

    sums: torch.Tensor
    partial: torch.Tensor
    blocks: TokenBlocks
    rows: int
