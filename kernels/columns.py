"""Column sums in canonical order: the gradient of a bias or of a norm's weight.

    acc += sum over token blocks of the block's column sums, in the order of the blocks

This file is the reference. On a GPU columns_triton.py sums the same blocks in the same order.

Shapes: dy [T, N]; acc [shards, N] in fp32 (fp64 for fp64).
Roundings: none but the accumulator's own.
Order: the rows of a block are padded with zeros to a power of two, and a binary tree sums them. More zeros
change no bit. So all blocks are padded to one length, and their trees run together.
"""

import torch
import torch.nn.functional as F

from .backend import on_cpp, on_triton
from .columns_cpp import add_columns as add_columns_cpp
from .grad import GradBuffer
from .order import TOKEN_BLOCK, TokenBlocks, tree_sum


def add_columns_ref(acc_SN: torch.Tensor, dy_TN: torch.Tensor, blocks: TokenBlocks) -> None:
    """The reference of add_columns. acc [shards, N]."""
    shards, rows = blocks.padded
    if len(shards):
        dy = F.pad(dy_TN.to(acc_SN.dtype), (0, 0, 1, 0))
        sums = tree_sum(dy.index_select(0, rows.view(-1)).view(*rows.shape, -1), 1)
        acc_SN.index_add_(0, shards, sums)  # one block after another


def add_columns_cpu(acc_SN: torch.Tensor, dy_TN: torch.Tensor, blocks: TokenBlocks) -> None:
    """add_columns on a CPU. acc [shards, N]."""
    fits = acc_SN.is_contiguous() and acc_SN.dtype == torch.float32 and blocks.bounds[2] <= len(dy_TN)
    if on_cpp(acc_SN) and fits:
        add_columns_cpp(acc_SN, dy_TN.float(), blocks)
    else:
        add_columns_ref(acc_SN, dy_TN, blocks)


def add_columns(buffer: GradBuffer, dy_TN: torch.Tensor, blocks: TokenBlocks) -> None:
    """buffer [shards, N] += the column sums of each block of dy [T, N], in the order of `blocks`."""
    if on_triton(dy_TN):
        from .columns_triton import bias_columns

        buffer.add_partials(bias_columns(dy_TN, blocks), blocks, TOKEN_BLOCK)
    else:
        add_columns_cpu(buffer.zeroed(blocks.shards), dy_TN, blocks)
