"""The order of every sum: constants, token blocks and fixed trees. A leaf: it imports nothing of zerokl.

Where the rest of an order stands: products with weights in matmul.py, column sums in columns.py, attention's
tiles in attention_plan.py, tiles on a GPU in tiles.py.

Every operation of a reference is one of these, which give the same bits wherever an element lies in a tensor:
operations that IEEE 754 rounds exactly (+ - * / sqrt); `torch.exp` and `torch.log` in fp32; a sum along the
last axis of a contiguous row; operations that walk a row element after element (cumsum, index_add_).
Operations that torch computes differently in the vector body and in the scalar tail (silu, sigmoid, addcmul,
lerp, `add(alpha=)`) are not used anywhere in zerokl.

Shapes: T rows (tokens), N width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

# Rows of the matrix product that defines a row's bits on a CPU: few enough that a small batch that decodes
# wastes little.
ROW_TILE = 32
# Tokens of one partial weight gradient: long enough to be compute-bound, short enough that a sum of them
# stays accurate.
TOKEN_BLOCK = 128
# Widths are padded to this many elements, so that no vector is ever cut (matmul.py).
ALIGN = 16
# Elements of one partial sum along a row.
SUM_TILE = 4096

Blocks = Sequence[tuple[int, int]]


def token_blocks(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows [start, end) of the token blocks of packed sequences, in canonical order.

    A block never holds tokens of two sequences, so a sequence's contribution to a weight gradient is the same
    whatever it is packed with.
    """
    blocks, start = [], 0
    for length in lengths:
        end = start + length
        blocks += [(s, min(s + TOKEN_BLOCK, end)) for s in range(start, end, TOKEN_BLOCK)]
        start = end
    return blocks


def one_sequence(x: torch.Tensor, blocks: Blocks | None) -> Blocks:
    """`blocks`, or the blocks of all rows of x taken as one sequence."""
    return token_blocks([x.shape[0]]) if blocks is None else blocks


def sum_row(x_TN: torch.Tensor) -> torch.Tensor:
    """Sum along the last axis in an order that depends on N only. [T, N] -> [T]."""
    T, N = x_TN.shape
    if N <= SUM_TILE:  # torch splits a single row over threads only above 32,768 elements
        return x_TN.sum(-1)
    tiles = F.pad(x_TN, (0, -N % SUM_TILE)).view(-1, SUM_TILE).sum(-1)
    return tiles.view(T, -1).sum(-1)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` by halving: a binary tree whose shape depends on the length of that axis only."""
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
    """Whether two tensors of one dtype and shape are equal as integers: what a probe decides by."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.view(integers), y.view(integers))
