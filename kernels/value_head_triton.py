"""Triton kernels of value_head.py. A forward program computes one row, a backward program one run of rows.

Forward: the products of a row are summed over tiles of 1024 columns, in ascending order.
Backward: one pass over the rows gives dh, and the sum of dv h over the run. columns_triton.py adds these sums
to dw. dv w is added to dh' in fp32.

Shapes: h, dh, dh' [T, D]; w [D]; v, dv [T] in fp32.
Roundings: dh once, to the dtype of h.
Order: the tile and the warps order the forward's sum, so both are constants. NORM_ROWS, and a loop over the
rows, order the backward's sums.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import NORM_ROWS
from .launch import dense, launch, next_power_of_2
from .order import TokenBlocks

# As in rms_norm_triton.py: each thread sums its 8 columns.
TILE, WARPS = 1024, 4
# Columns of one thread in the backward: the accumulator, a row of h, of w and of dh' are in registers.
THREAD_COLUMNS = 16


@triton.jit
def _value_head_fwd(h_ptr, w_ptr, v_ptr, D, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        h = tl.load(h_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        v += tl.sum(h * w)
    tl.store(v_ptr + row + tl.arange(0, 1), v)


@triton.jit
def _value_head_bwd(
    dv_ptr,
    dh_after_ptr,
    h_ptr,
    w_ptr,
    dh_ptr,
    partial_ptr,
    table_ptr,
    D,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    run = tl.program_id(0)
    start = tl.load(table_ptr + 2 * run)
    end = tl.load(table_ptr + 2 * run + 1)
    cols = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    for i in range(0, ROWS):
        row = (start + i + tl.arange(0, 1)).to(tl.int64)
        mask = (row < end) & (cols < D)
        dv = tl.load(dv_ptr + row, mask=row < end, other=0.0)
        place = row * D + cols
        h = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(dh_after_ptr + place, mask=mask, other=0.0).to(tl.float32) + dv * w
        tl.store(dh_ptr + place, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        acc += dv * h
    tl.store(partial_ptr + run.to(tl.int64) * D + cols, acc, mask=cols < D)


def value_head_fwd(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """v [T] in fp32. h [T, D]; w [D]."""
    h, (T, D) = dense(h), h.shape
    v = torch.empty(T, dtype=torch.float32, device=h.device)
    if T:
        launch(_value_head_fwd, (T,), h, dense(w), v, D, TILE=TILE, num_warps=WARPS)
    return v


def value_head_bwd(
    dv: torch.Tensor, dh_after: torch.Tensor, h: torch.Tensor, w: torch.Tensor, blocks: TokenBlocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh like h, and the sums of dv h over runs of NORM_ROWS rows, [runs, D] (order.BlockTables).

    dv [T]; dh_after: dh', like h. Every row must be in one of the blocks.
    """
    h, D = dense(h), h.shape[1]
    width, table = next_power_of_2(D), blocks.on(h.device).pieces(NORM_ROWS)
    dh = torch.empty_like(h)
    partial = torch.empty(len(table), D, dtype=torch.float32, device=h.device)
    launch(
        _value_head_bwd,
        (len(table),),
        dense(dv),
        dense(dh_after),
        h,
        dense(w),
        dh,
        partial,
        table,
        D,
        ROWS=NORM_ROWS,
        WIDTH=width,
        num_warps=min(max(WARPS, width // (32 * THREAD_COLUMNS)), 32),
    )
    return dh, partial
