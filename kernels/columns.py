"""Column sums in canonical order: the gradient of a bias or of a norm's weight.

    acc += sum over token blocks of the block's column sums, in the order of the blocks

This file is the reference. On a GPU columns_triton.py sums the same blocks in the same order.

Shapes: dy [T, N]; acc [shards, N] in fp32 (fp64 for fp64).
Roundings: none but the accumulator's own.
Order: the rows of a block are padded with zeros to a power of two, and a binary tree sums them. More zeros
change no bit. So all blocks are padded to one length, and their trees run together.
"""

import torch

from .backend import on_triton
from .grad import GradBuffer
from .order import TOKEN_BLOCK, TokenBlocks, tree_sum


def add_columns_ref(acc_SN: torch.Tensor, dy_TN: torch.Tensor, blocks: TokenBlocks) -> None:
    """The reference of add_columns. acc [shards, N]."""
    for shard, shard_blocks in blocks.parts:
        longest = max((end - start for start, end in shard_blocks), default=0)
        if not longest:
            continue
        padded = 1 << (longest - 1).bit_length()
        rows = dy_TN.new_zeros(len(shard_blocks), padded, dy_TN.shape[1], dtype=acc_SN.dtype)
        for block, (start, end) in zip(rows, shard_blocks, strict=True):
            block[: end - start] = dy_TN[start:end]
        for column_sums in tree_sum(rows, 1):
            acc_SN[shard] += column_sums


def add_columns(buffer: GradBuffer, dy_TN: torch.Tensor, blocks: TokenBlocks) -> None:
    """buffer [shards, N] += the column sums of each block of dy [T, N], in the order of `blocks`."""
    if on_triton(dy_TN):
        from .columns_triton import bias_columns

        buffer.add_partials(bias_columns(dy_TN, blocks), blocks, TOKEN_BLOCK)
    else:
        add_columns_ref(buffer.zeroed(blocks.shards), dy_TN, blocks)
