"""The order of every sum: constants, token blocks and fixed trees. A leaf: it imports nothing of zerokl.

Other files define the rest of the order: matmul.py (products with weights), columns.py (column sums),
attention_plan.py (tiles of the attention) and tiles.py (tiles on a GPU).

The references use only operations that give the same bits wherever an element lies in a tensor:

- operations that IEEE 754 rounds exactly (+ - * /);
- `torch.sqrt`, `torch.exp` and `torch.log` in fp32. With MKL (torch 2.13) the square root is one unit in the
  last place off for 17% of numbers, but the same for equal numbers;
- a sum along the last axis of a contiguous row;
- operations that walk a row element after element (cumsum, index_add_).

Some operations of torch differ between the vector body and the scalar tail: silu, sigmoid, addcmul, lerp,
`add(alpha=)`. zerokl does not use them anywhere.

Shapes: T rows (tokens), N width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Rows of the matrix product that defines a row's bits on a CPU. They are few, so that a small batch wastes
# little when it decodes.
ROW_TILE = 32
# Tokens of one partial weight gradient. They are enough to be compute-bound, and few enough for an accurate
# sum.
TOKEN_BLOCK = 128
# Widths are padded to a multiple of this many elements, so that no vector is ever cut (matmul.py).
ALIGN = 16
# Elements of one partial sum along a row.
SUM_TILE = 4096

Blocks = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ShardBlocks:
    """Token blocks of several virtual shards in one pass. The rows of the shards lie one after another."""

    shards: tuple[int, ...]  # the buffer of each shard that has rows here (grad.by_shard)
    blocks: tuple[Blocks, ...]


PassBlocks = Blocks | ShardBlocks


def shard_blocks(lengths: Sequence[int], shards: Sequence[int] | None) -> PassBlocks:
    """The token blocks of packed sequences; with `shards`, separate for each shard.

    shards [S]: the shard of each sequence, in ascending order.
    """
    if shards is None:
        return token_blocks(lengths)
    by_shard: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length, shard in zip(lengths, shards, strict=True):
        blocks = token_blocks([length])
        by_shard.setdefault(shard, []).extend((start + a, start + b) for a, b in blocks)
        start += length
    return ShardBlocks(tuple(by_shard), tuple(by_shard.values()))


def token_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows [start, end) of the token blocks of packed sequences, in canonical order.

    A block never holds tokens of two sequences. So the contribution of a sequence to a weight gradient is the
    same, whatever the sequence is packed with.
    """
    blocks, start = [], 0
    for length in lengths:
        end = start + length
        blocks += [(s, min(s + TOKEN_BLOCK, end)) for s in range(start, end, TOKEN_BLOCK)]
        start = end
    return blocks


def one_sequence(x: torch.Tensor, blocks: PassBlocks | None) -> PassBlocks:
    """`blocks`, or the blocks of all rows of x taken as one sequence."""
    return token_blocks([x.shape[0]]) if blocks is None else blocks


def sum_row(x_TN: torch.Tensor) -> torch.Tensor:
    """The sum along the last axis, in an order that depends on N only. [T, N] -> [T]."""
    T, N = x_TN.shape
    if N <= SUM_TILE:  # torch splits a single row over threads only above 32,768 elements
        return x_TN.sum(-1)
    tiles = F.pad(x_TN, (0, -N % SUM_TILE)).view(-1, SUM_TILE).sum(-1)
    return tiles.view(T, -1).sum(-1)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over `dim` by halving: a binary tree whose shape depends on the length of this axis only."""
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, n - half)
        if n % 2:
            low = torch.cat([low.narrow(dim, 0, half - 1) + high, low.narrow(dim, half - 1, 1)], dim)
        else:
            low = low + high
        x = low
    return x.squeeze(dim)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal as integers. The probes decide by this."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.view(integers), y.view(integers))
