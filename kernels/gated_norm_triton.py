"""Triton kernels of gated_norm.py. A forward program has some heads, a backward program a run of tokens.

Shapes: o, z, y [T, H, V]; w [V]; partial sums of dw [runs, V] in fp32 (columns_triton.py).
Roundings: y once; do and dz once each.
Order: a row's sum is one of its power of two of columns. A run's contributions to dw are added token after
token, and then head with head.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import NORM_ROWS
from .exp_triton import sigmoid, silu
from .launch import ceil_div, dense, launch, next_power_of_2
from .order import TokenBlocks

# Heads of a forward program. They decide no bit. Its warps order the sum along a row.
HEADS, WARPS = 16, 4
# Elements of a token that one warp of a backward program holds. With more of them, registers spill.
WARP_ELEMENTS = 512


@triton.jit
def _unit_rms(o, V, eps):
    """o r and r, of each row."""
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(o * o, axis=1) / V + eps))[:, None]
    return o * r, r


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_fwd(o_ptr, z_ptr, w_ptr, y_ptr, rows, V, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)[None, :]
    mask = (row < rows)[:, None] & (column < V)
    place = row.to(tl.int64)[:, None] * V + column
    o = tl.load(o_ptr + place, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    y = _unit_rms(o, V, eps)[0] * w * silu(z)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_norm_bwd(
    dy_ptr,
    o_ptr,
    z_ptr,
    w_ptr,
    do_ptr,
    dz_ptr,
    partial_ptr,
    table_ptr,
    H,
    V,
    eps,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    run = tl.program_id(0)
    start, end = tl.load(table_ptr + 2 * run), tl.load(table_ptr + 2 * run + 1)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)[None, :]
    w = tl.load(w_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    for i in range(0, ROWS):
        mask = (head < tl.where(start + i < end, H, 0))[:, None] & (column < V)
        place = ((start + i).to(tl.int64) * H + head)[:, None] * V + column
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(o_ptr + place, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
        oh, r = _unit_rms(o, V, eps)
        s = sigmoid(z)
        gated = dy * silu(z)
        n = gated * w
        do = (n - oh * (tl.sum(n * oh, axis=1)[:, None] / V)) * r
        dz = dy * oh * w * (s * (1.0 + z * (1.0 - s)))
        tl.store(do_ptr + place, do.to(do_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        total += gated * oh
    sums = tl.sum(total, axis=0)[None, :]
    tl.store(partial_ptr + run.to(tl.int64) * V + column, sums, mask=column < V)


def gated_norm_fwd(o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """y [T, H, V]."""
    (T, H, V), y = o.shape, torch.empty(o.shape, dtype=o.dtype, device=o.device)
    launch(
        _gated_norm_fwd,
        (ceil_div(T * H, HEADS),),
        dense(o),
        dense(z),
        dense(w),
        y,
        T * H,
        V,
        eps,
        HEADS=HEADS,
        WIDTH=next_power_of_2(V),
        num_warps=WARPS,
    )
    return y


def gated_norm_bwd(
    dy: torch.Tensor, o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, blocks: TokenBlocks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """do and dz [T, H, V], and the sums of dw over each run of NORM_ROWS tokens, [runs, V].

    Every row that a gradient reaches must be in one of the blocks.
    """
    (_, H, V), dy, table = o.shape, dense(dy), blocks.on(o.device).pieces(NORM_ROWS)
    do, dz = torch.empty_like(dy), torch.empty_like(dy)
    partial = torch.empty(len(table), V, dtype=torch.float32, device=o.device)
    heads, width = next_power_of_2(H), next_power_of_2(V)
    launch(
        _gated_norm_bwd,
        (len(table),),
        dy,
        dense(o),
        dense(z),
        dense(w),
        do,
        dz,
        partial,
        table,
        H,
        V,
        eps,
        ROWS=NORM_ROWS,
        HEADS=heads,
        WIDTH=width,
        num_warps=min(max(WARPS, heads * width // WARP_ELEMENTS), 32),
    )
    return do, dz, partial
