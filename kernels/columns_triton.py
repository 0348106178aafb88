"""Column sums in canonical order on a GPU: the gradient of a bias or of a norm's weight. No atomics.

    bias: acc += sum_t dy          norm: acc += sum_t dy x r

There are two passes. First, one program for each token block and column tile sums the rows of the block into
a partial sum. Then, one program for each column tile adds the partial sums to the gradient.

Shapes: dy, x [T, H, D]; r [T, H] in fp32; partial [blocks, D] and acc [D] in fp32. The H heads are summed
with the tokens; H is 1 for a bias.
Roundings: none but those of fp32 itself.
Order: the partial sums are added block after block, in the order of the blocks. The blocks of a sequence are
the same whatever the sequence is packed with. So the bits depend on the order of the sequences only.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .launch import dense, launch
from .order import TOKEN_BLOCK, Blocks

# Columns of one program: 64 loads of 16 bits fill a cache line.
COLUMNS = 64
# Rows loaded at once: 16 rows of 64 columns are 8 elements for each of 128 threads. ROWS, COLUMNS and WARPS
# order the sum.
ROWS = 16
WARPS = 4


@triton.jit(do_not_specialize=["first", "heads"])
def _block_columns(
    dy_ptr,
    x_ptr,
    r_ptr,
    table_ptr,
    partial_ptr,
    x_stride_t,
    H,
    first,
    heads,
    D,
    HAS_X: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(table_ptr + 2 * block)
    end = tl.load(table_ptr + 2 * block + 1)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for i in range(0, TOKEN_BLOCK, ROWS):
        rows = (start + i + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < end)[:, None] & (cols < D)[None, :]
        for h in range(first, first + heads):
            dy_tile = dy_ptr + rows[:, None] * (H * D) + h * D + cols[None, :]
            dy = tl.load(dy_tile, mask=mask, other=0.0).to(tl.float32)
            if HAS_X:
                x_tile = x_ptr + rows[:, None] * x_stride_t + h * D + cols[None, :]
                x = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
                r = tl.load(r_ptr + rows * H + h, mask=rows < end, other=0.0)
                dy = dy * (x * r[:, None])
            acc += dy
    tl.store(partial_ptr + block.to(tl.int64) * D + cols, tl.sum(acc, axis=0), mask=cols < D)


# Triton does not specialise on the alignment of acc, a weight's place in the gradient buffer. The alignment
# changes no order, and so one binary serves all weights.
@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["acc_ptr"])
def _add_partials(acc_ptr, partial_ptr, blocks, D, COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.load(acc_ptr + cols, mask=cols < D, other=0.0)
    partial = partial_ptr + cols
    for _ in range(blocks):
        acc += tl.load(partial, mask=cols < D, other=0.0)
        partial += D
    tl.store(acc_ptr + cols, acc, mask=cols < D)


@lru_cache(maxsize=64)
def _table(blocks: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """The first row and the end of each token block, [blocks, 2] int32 on the device.

    The result is cached, because every layer of a micro-batch asks for the same table.
    """
    return torch.tensor(blocks, dtype=torch.int32).to(device)


def add_columns(
    acc: torch.Tensor,
    dy: torch.Tensor,
    blocks: Blocks,
    x: torch.Tensor | None = None,
    r: torch.Tensor | None = None,
    x_stride_t: int = 0,
    first: int = 0,
    heads: int = 1,
) -> None:
    """acc [D] += the sum of dy, or of dy x r, over the tokens and over `heads` heads from `first` on.

    dy [T, H, D] dense; x [T, H, D], whose tokens are x_stride_t elements apart; r [T, H].
    """
    _, H, D = dy.shape
    tiles = triton.cdiv(D, COLUMNS)
    partial = torch.empty(len(blocks), D, dtype=torch.float32, device=dy.device)
    launch(
        _block_columns,
        (len(blocks), tiles),
        dy,
        dy if x is None else x,
        dy if r is None else r,
        _table(tuple(blocks), dy.device),
        partial,
        x_stride_t,
        H,
        first,
        heads,
        D,
        HAS_X=x is not None,
        TOKEN_BLOCK=TOKEN_BLOCK,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    launch(_add_partials, (tiles,), acc, partial, len(blocks), D, COLUMNS=COLUMNS, num_warps=1)


def add_bias_columns(acc_N: torch.Tensor, dy_TN: torch.Tensor, blocks: Blocks) -> None:
    """columns.add_columns on Triton: acc [N] += the column sums of each block of dy [T, N]."""
    add_columns(acc_N, dense(dy_TN).unsqueeze(1), blocks)
