"""Triton kernels of qk_norm.py: the norm of each query head and of each key head of some tokens.

A forward program normalises some heads of one token, and a backward program all query heads, or all key
heads, of one run of tokens. The formulas are those of rms_norm_triton.py.

Shapes: x, y, dy, dx [T, H, D]; wq, wk [D]; r = 1 / rms [T, H] in fp32. x may be a slice of wider rows. The
first `heads` of the H heads are the queries.
Roundings: y once, dx once.
Order: a head has the bits of vLLM's `_rms_norm_kernel` (rms_norm_triton.py). In vLLM's tile a head of at most
128 columns lies in the first warp, and all other lanes add zeros to a sum of squares. Here a thread has one
load of one head, which is what vLLM's thread has, and the same butterflies add the lanes of a head. The
compiler decides which multiplication is fused with which addition. It decides as in vLLM's kernel, because
the source has the same form: loops over the columns, and a second load of x. With x kept in registers it
decided otherwise (tests/triton/ahead_of_time.py compares). The forward of wider heads runs rms_norm's
kernel, with a head as a row.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import NORM_ROWS
from .launch import ceil_div, dense, launch, next_power_of_2
from .order import TokenBlocks
from .rms_norm_triton import rms_norm_fwd

# The widest head that lies in the first warp of vLLM's tile, in every dtype.
HEAD_COLUMNS = 128
# The fewest warps of a program, and the elements of a token that one warp of a backward program holds. With
# more of them, registers spill. NORM_ROWS, the heads' power of two and the warps order a backward program's
# sums.
WARPS, WARP_ELEMENTS = 4, 512
# Bytes that a forward program reads: one load of 16 for each thread.
BYTES = WARPS * 32 * 16


@triton.jit
def _qk_norm_fwd(
    x_ptr,
    wq_ptr,
    wk_ptr,
    y_ptr,
    r_ptr,
    x_stride_t,
    H,
    heads,
    D,
    eps,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    sum_sq = tl.zeros([HEADS], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = (h < H)[:, None] & (cols < D)[None, :]
        place = h[:, None] * D + cols[None, :]
        x = tl.load(x_ptr + token * x_stride_t + place, mask=mask, other=0.0).to(tl.float32)
        sum_sq += tl.sum(tl.where(mask, x * x, 0.0), axis=1)
    rms = tl.sqrt(sum_sq / D + eps)
    r = 1.0 / rms
    tl.store(r_ptr + token * H + h, r, mask=h < H)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = (h < H)[:, None] & (cols < D)[None, :]
        place = h[:, None] * D + cols[None, :]
        x = tl.load(x_ptr + token * x_stride_t + place, mask=mask, other=0.0).to(tl.float32)
        # Two loads, each for its own heads. Triton 3.6 and 3.7 fail for AMD on a choice between two pointers.
        is_key = tl.broadcast_to((h >= heads)[:, None], [HEADS, TILE])
        same_w = tl.zeros([HEADS, 1], dtype=tl.int32) + cols[None, :]
        w = tl.load(wq_ptr + same_w, mask=mask & ~is_key, other=1.0)
        w = tl.load(wk_ptr + same_w, mask=mask & is_key, other=w)
        y = x * r[:, None] * w.to(tl.float32)
        tl.store(y_ptr + token * H * D + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_bwd(
    # pointers
    dy_ptr,
    x_ptr,
    wq_ptr,
    wk_ptr,
    r_ptr,
    dx_ptr,
    partial_ptr,
    table_ptr,
    # strides, in elements
    x_stride_t,
    # sizes
    H,
    heads,
    D,
    # constants
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    run, keys = tl.program_id(0), tl.program_id(1)
    start = tl.load(table_ptr + 2 * run)
    end = tl.load(table_ptr + 2 * run + 1)
    h = keys * heads + tl.arange(0, HEADS)
    heads_end = tl.where(keys == 0, heads, H)
    cols = tl.arange(0, WIDTH)
    w_ptr = wq_ptr if keys == 0 else wk_ptr
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    place = h[:, None] * D + cols[None, :]
    acc = tl.zeros([HEADS, WIDTH], dtype=tl.float32)
    for i in range(0, ROWS):
        token = (start + i).to(tl.int64)
        in_run = h < tl.where(start + i < end, heads_end, 0)
        mask = in_run[:, None] & (cols < D)[None, :]
        dy = tl.load(dy_ptr + token * H * D + place, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + token * x_stride_t + place, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + token * H + h, mask=in_run, other=0.0)[:, None]
        xh = x * r
        dyw = dy * w
        mean = tl.sum(dyw * xh, axis=1)[:, None] / D
        dx = r * (dyw - xh * mean)
        tl.store(dx_ptr + token * H * D + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        acc += dy * xh
    sums = partial_ptr + (keys * tl.num_programs(0) + run).to(tl.int64) * D
    tl.store(sums + cols, tl.sum(acc, axis=0), mask=cols < D)


def _rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] itself where Triton specialises on it as on dense rows, else a dense copy.

    Triton does so where the strides and the address of x are multiples of 16.
    """
    D = x.shape[2]
    dense_heads = x.stride(1) == D and x.stride(2) == 1
    if D % 16 == 0 and dense_heads and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return dense(x)


def _token_stride(x: torch.Tensor) -> int:
    """The elements between two tokens. Torch leaves the stride of a single token undefined."""
    return x.shape[1] * x.shape[2] if x.is_contiguous() else x.stride(0)


def qk_norm_fwd(
    x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, heads: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and r [T, H]. x [T, H, D]; wq, wk [D]."""
    T, H, D = x.shape
    if D > HEAD_COLUMNS:
        parts = ((x[:, :heads], wq), (x[:, heads:], wk))
        y, r, _ = zip(*(rms_norm_fwd(part.reshape(-1, D), w, eps) for part, w in parts), strict=True)
        return torch.cat([t.view(T, -1, D) for t in y], 1), torch.cat([t.view(T, -1) for t in r], 1)
    x, at_once = _rows_of_heads(x), BYTES // (HEAD_COLUMNS * x.element_size())
    y = torch.empty(T, H, D, dtype=x.dtype, device=x.device)
    r = torch.empty(T, H, dtype=torch.float32, device=x.device)
    launch(
        _qk_norm_fwd,
        (T, ceil_div(H, at_once)),
        x,
        dense(wq),
        dense(wk),
        y,
        r,
        _token_stride(x),
        H,
        heads,
        D,
        eps,
        HEADS=at_once,
        TILE=HEAD_COLUMNS,
        num_warps=WARPS,
    )
    return y, r


def qk_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    r: torch.Tensor,
    heads: int,
    blocks: TokenBlocks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, like dy, and the sums of dy x r over each run's query heads and key heads, [2, runs, D].

    dy, x [T, H, D]. Every row must be in one of the blocks.
    """
    x, dy, (_, H, D) = _rows_of_heads(x), dense(dy), x.shape
    table = blocks.on(x.device).pieces(NORM_ROWS)
    heads_at_once, width = (next_power_of_2(n) for n in (max(heads, H - heads), D))
    dx = torch.empty_like(dy)
    partial = torch.empty(2, len(table), D, dtype=torch.float32, device=x.device)
    launch(
        _qk_norm_bwd,
        (len(table), 2),
        dy,
        x,
        dense(wq),
        dense(wk),
        r,
        dx,
        partial,
        table,
        _token_stride(x),
        H,
        heads,
        D,
        ROWS=NORM_ROWS,
        HEADS=heads_at_once,
        WIDTH=width,
        num_warps=min(max(WARPS, heads_at_once * width // WARP_ELEMENTS), 32),
    )
    return dx, partial
