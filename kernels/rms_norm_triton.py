"""Triton kernels of rms_norm.py. A forward program computes one row, and a backward program one run of rows.

Forward: as vLLM 0.32's batch-invariant `_rms_norm_kernel` (model_executor/determinism/batch_invariant.py).
First the sum of squares over tiles of 1024 columns in ascending order, then r = 1.0 / sqrt(sum / D + eps),
then x r w in fp32. The row is read a second time, as in vLLM's kernel, whose instructions these are.
Backward: one pass over x and dy gives dx, and the sum of dy x r over the run. columns_triton.py adds these
sums to dw. The gradient of s is added to dx in fp32.

Shapes: x, residual, s, y, dy, ds, dx [T, D]; w [D]; r = 1 / rms [T] in fp32.
Roundings: y once. With a residual, s = x + residual is rounded to the dtype first, and the norm reads this s.
dx once.
Order: vLLM's tile and its four warps order the forward's sum, so both are constants. The width's power of
two, NORM_ROWS, the rows at once and the warps order the backward's sums; width and dtype decide them.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import NORM_ROWS
from .launch import dense, launch, next_power_of_2
from .order import TokenBlocks

# vLLM's tile and warps. Each thread sums its 8 columns. Butterflies of 16, 8, 4, 2, 1 add the lanes, and then
# the warps are added.
TILE, WARPS = 1024, 4
# The largest row, in bytes, of which a backward program computes two at once.
TWO_ROWS = 4096
# Bytes of a row that one warp of a backward program holds. With more of them, registers spill.
WARP_BYTES = 1024


@triton.jit
def _rms_norm_fwd(
    x_ptr,
    residual_ptr,
    s_ptr,
    w_ptr,
    y_ptr,
    r_ptr,
    D,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sum_sq = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        x = tl.load(x_ptr + row * D + cols, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * D + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(s_ptr + row * D + cols, x, mask=mask)
        x = x.to(tl.float32)
        sum_sq += tl.sum(tl.where(mask, x * x, 0.0))
    rms = tl.sqrt(sum_sq / D + eps)
    r = 1.0 / rms
    tl.store(r_ptr + row + tl.arange(0, 1), r)  # stored always, so that sampling and training run one binary
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        x = tl.load(x_ptr + row * D + cols, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * D + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        w = tl.load(w_ptr + cols, mask=mask, other=1.0)
        y = x.to(tl.float32) * r * w.to(tl.float32)
        tl.store(y_ptr + row * D + cols, y.to(x.dtype), mask=mask)


@triton.jit
def _read_rows(x_ptr, dy_ptr, ds_ptr, r_ptr, rows, end, cols, D, HAS_DS: tl.constexpr):
    """x, dy and ds [rows, columns] and r [rows] before `end`; zeros past it. Without ds, dy in its place."""
    mask = (rows < end)[:, None] & (cols < D)[None, :]
    place = rows[:, None] * D + cols[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + place, mask=mask, other=0.0)
    ds = tl.load(ds_ptr + place, mask=mask, other=0.0) if HAS_DS else dy
    return x, dy, ds, tl.load(r_ptr + rows, mask=rows < end, other=0.0)


@triton.jit
def _rms_norm_bwd(
    dy_ptr,
    ds_ptr,
    x_ptr,
    w_ptr,
    r_ptr,
    dx_ptr,
    partial_ptr,
    table_ptr,
    D,
    HAS_DS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    run = tl.program_id(0)
    start = tl.load(table_ptr + 2 * run)
    end = tl.load(table_ptr + 2 * run + 1)
    cols = tl.arange(0, WIDTH)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros([AT_ONCE, WIDTH], dtype=tl.float32)
    rows = (start + tl.arange(0, AT_ONCE)).to(tl.int64)
    x, dy, ds, r = _read_rows(x_ptr, dy_ptr, ds_ptr, r_ptr, rows, end, cols, D, HAS_DS)
    for _ in range(0, ROWS, AT_ONCE):
        # The next rows are read before these are computed, so that the memory is not idle.
        after = rows + AT_ONCE
        following = _read_rows(x_ptr, dy_ptr, ds_ptr, r_ptr, after, end, cols, D, HAS_DS)
        xh = x.to(tl.float32) * r[:, None]
        dyf = dy.to(tl.float32)
        dyw = dyf * w
        mean = tl.sum(dyw * xh, axis=1)[:, None] / D
        dx = r[:, None] * (dyw - xh * mean)
        if HAS_DS:
            dx += ds.to(tl.float32)
        place = rows[:, None] * D + cols[None, :]
        mask = (rows < end)[:, None] & (cols < D)[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        acc += dyf * xh
        rows = after
        x, dy, ds, r = following
    tl.store(partial_ptr + run.to(tl.int64) * D + cols, tl.sum(acc, axis=0), mask=cols < D)


def rms_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, r [T] and s; without a residual s is x. x [T, D]; w [D]; residual like x."""
    x, (T, D) = dense(x), x.shape
    y = torch.empty_like(x)
    r = torch.empty(T, dtype=torch.float32, device=x.device)
    s = x if residual is None else torch.empty_like(x)
    launch(
        _rms_norm_fwd,
        (T,),
        x,
        x if residual is None else dense(residual),
        s,
        dense(w),
        y,
        r,
        D,
        eps,
        HAS_RESIDUAL=residual is not None,
        TILE=TILE,
        num_warps=WARPS,
    )
    return y, r, s


def rms_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    blocks: TokenBlocks,
    ds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, like dy, and the sums of dy x r over runs of NORM_ROWS rows, [runs, D] (order.BlockTables).

    dy, ds [T, D]; x is the input of the norm, the s that rms_norm_fwd returned. Every row must be in one of
    the blocks.
    """
    x, dy, D = dense(x), dense(dy), x.shape[1]
    width = next_power_of_2(D)
    table = blocks.on(x.device).pieces(NORM_ROWS)
    dx = torch.empty_like(dy)
    partial = torch.empty(len(table), D, dtype=torch.float32, device=x.device)
    launch(
        _rms_norm_bwd,
        (len(table),),
        dy,
        dy if ds is None else dense(ds),
        x,
        dense(w),
        r,
        dx,
        partial,
        table,
        D,
        HAS_DS=ds is not None,
        ROWS=NORM_ROWS,
        AT_ONCE=2 if D * x.element_size() <= TWO_ROWS else 1,
        WIDTH=width,
        num_warps=min(max(WARPS, width * x.element_size() // WARP_BYTES), 32),
    )
    return dx, partial
