"""Column sums through the loops of cpp/columns.cpp, with the bits of columns.add_columns_ref."""

import torch

from .cpp import call
from .order import TokenBlocks


def add_columns(acc: torch.Tensor, dy: torch.Tensor, blocks: TokenBlocks) -> None:
    """acc [shards, N] += the column sums of each block of dy [T, N], both fp32."""
    (bounds, padded, _), dy = blocks.bounds, dy.contiguous()
    call("add_columns", None, acc, dy, bounds, len(bounds), dy.shape[1], padded)
