"""Column sums in canonical order: the gradient of a bias (sum_t dy) or of a norm's weight (sum_t dy x r). No
atomics.

Two passes. First one program for each token block and column tile sums the block's rows into a partial; then
one program for each column tile adds the partials to the gradient, block after block in the order given. A
sequence's blocks are the same whatever it is packed with, so the bits depend on the order of the sequences
only.

dy, x [T, H, D] (H heads are summed with the tokens; 1 for a bias), r [T, H] fp32, partial [blocks, D], acc
[D], both fp32. Roundings: none but fp32's own.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .launch import dense, launch
from .order import TOKEN_BLOCK, Blocks

# Columns of one program: 16-bit loads of a row fill a cache line.
COLUMNS = 64
# Rows loaded at once; orders the sum, with COLUMNS and WARPS: sixteen rows of 64 columns are 8 elements for
# each of 128 threads.
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
            dy = tl.load(dy_ptr + rows[:, None] * (H * D) + h * D + cols[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            if HAS_X:
                x = tl.load(
                    x_ptr + rows[:, None] * x_stride_t + h * D + cols[None, :], mask=mask, other=0.0
                ).to(tl.float32)
                r = tl.load(r_ptr + rows * H + h, mask=rows < end, other=0.0)
                dy = dy * (x * r[:, None])
            acc += dy
    tl.store(partial_ptr + block.to(tl.int64) * D + cols, tl.sum(acc, axis=0), mask=cols < D)


# The alignment of a weight's place in the gradient buffer is left unused: it changes no order, and one binary
# serves all.
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
    """The token blocks' first rows and ends, [blocks, 2] int32 on the device; kept, as every layer of a
    micro-batch asks for the same.
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
    """acc [D] += the sum over tokens and `heads` heads from `first` on of dy, or of dy x r.

    dy [T, H, D] dense; x [T, H, D] with tokens x_stride_t apart; r [T, H].
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
    """columns.add_columns on Triton."""
    add_columns(acc_N, dense(dy_TN).unsqueeze(1), blocks)
