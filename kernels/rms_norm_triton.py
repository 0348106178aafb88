"""Triton kernels of rms_norm.py. One program computes one row.

Forward: as vLLM 0.32's batch-invariant `_rms_norm_kernel` (model_executor/determinism/batch_invariant.py).
First the sum of squares over tiles of 1024 columns in ascending order, then r = 1.0 / sqrt(sum / D + eps),
then x r w in fp32.
Backward: dx of a row comes from the row's x, dy and r. The gradient of s is added in fp32. columns_triton.py
computes dw.

Shapes: x, residual, s, y, dy, ds, dx [T, H, D], with H = 1 without heads; w [D] or [H, D]; r = 1 / rms [T, H]
in fp32. x may be a slice of wider rows.
Roundings: y once. With a residual, s = x + residual is rounded to the dtype first, and the norm reads this s.
dx once.
Order: vLLM's tile and its four warps order the sum, so both are constants.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import add_columns
from .launch import dense, launch
from .order import Blocks

# vLLM's tile and warps. Each thread sums its 8 columns. Butterflies of 16, 8, 4, 2, 1 add the lanes, and then
# the warps are added.
TILE, WARPS = 1024, 4
# With vLLM's tile, a row of at most 128 columns lies in the first warp. A tile of 256 columns and one warp
# has the same columns, lanes and butterflies for such a row. The smaller tile only leaves out additions of
# zeros to a sum of squares.
HEAD_TILE, HEAD_WARPS, HEAD_COLUMNS = 256, 1, 128


@triton.jit
def _rms_norm_fwd(
    x_ptr,
    residual_ptr,
    s_ptr,
    w_ptr,
    y_ptr,
    r_ptr,
    x_stride_t,
    x_stride_h,
    w_stride_h,
    H,
    D,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + (row // H) * x_stride_t + (row % H) * x_stride_h
    w_row = w_ptr + (row % H) * w_stride_h
    sum_sq = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        x = tl.load(x_row + cols, mask=mask, other=0.0)
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
        x = tl.load(x_row + cols, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * D + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        w = tl.load(w_row + cols, mask=mask, other=1.0)
        y = x.to(tl.float32) * r * w.to(tl.float32)
        tl.store(y_ptr + row * D + cols, y.to(x.dtype), mask=mask)


@triton.jit
def _rms_norm_bwd(
    dy_ptr,
    ds_ptr,
    x_ptr,
    w_ptr,
    r_ptr,
    dx_ptr,
    x_stride_t,
    x_stride_h,
    w_stride_h,
    H,
    D,
    HAS_DS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + (row // H) * x_stride_t + (row % H) * x_stride_h
    w_row = w_ptr + (row % H) * w_stride_h
    r = tl.load(r_ptr + row)
    dot = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        xh = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32) * r
        w = tl.load(w_row + cols, mask=mask, other=0.0).to(tl.float32)
        dyw = tl.load(dy_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32) * w
        dot += tl.sum(dyw * xh)
    mean = dot / D
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        xh = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32) * r
        w = tl.load(w_row + cols, mask=mask, other=0.0).to(tl.float32)
        dyw = tl.load(dy_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32) * w
        dx = r * (dyw - xh * mean)
        if HAS_DS:
            dx += tl.load(ds_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _options(D: int) -> dict[str, int]:
    if D <= HEAD_COLUMNS:
        return {"TILE": HEAD_TILE, "num_warps": HEAD_WARPS}
    return {"TILE": TILE, "num_warps": WARPS}


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] itself where Triton specialises on it as on dense rows, else a dense copy.

    Triton does so where the strides and the address of x are multiples of 16.
    """
    D = x.shape[2]
    dense_heads = x.stride(1) == D and x.stride(2) == 1
    if D % 16 == 0 and dense_heads and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return dense(x)


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """The strides of a token and of a head.

    The strides of a dense tensor come from its shape, because torch leaves the stride of an axis of size 1
    undefined.
    """
    return (x.shape[1] * x.shape[2] if x.is_contiguous() else x.stride(0)), x.shape[2]


def rms_norm_fwd(
    x: torch.Tensor, w: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, r [T, H] and s; without a residual s is x. x [T, H, D]; w [D] or [H, D]; residual like x."""
    x, (T, H, D) = _rows(x), x.shape
    y = torch.empty(T, H, D, dtype=x.dtype, device=x.device)
    r = torch.empty(T, H, dtype=torch.float32, device=x.device)
    s = x if residual is None else torch.empty_like(y)
    launch(
        _rms_norm_fwd,
        (T * H,),
        x,
        x if residual is None else dense(residual),
        s,
        dense(w),
        y,
        r,
        *_strides(x),
        0 if w.dim() == 1 else D,
        H,
        D,
        eps,
        HAS_RESIDUAL=residual is not None,
        **_options(D),
    )
    return y, r, s


def rms_norm_bwd(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, ds: torch.Tensor | None = None
) -> torch.Tensor:
    """dx, like dy. dy, ds [T, H, D]; x is the input of the norm, the s that rms_norm_fwd returned."""
    x, dy, (T, H, D) = _rows(x), dense(dy), dy.shape
    dx = torch.empty_like(dy)
    launch(
        _rms_norm_bwd,
        (T * H,),
        dy,
        dy if ds is None else dense(ds),
        x,
        dense(w),
        r,
        dx,
        *_strides(x),
        0 if w.dim() == 1 else D,
        H,
        D,
        HAS_DS=ds is not None,
        **_options(D),
    )
    return dx


def add_weight_grad(
    acc: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    r: torch.Tensor,
    blocks: Blocks,
    first: int = 0,
    heads: int = 1,
) -> None:
    """acc [D] += the sum of dy x r over the tokens and over `heads` heads from `first` on.

    dy, x [T, H, D], r [T, H].
    """
    x = _rows(x)
    add_columns(acc, dense(dy), blocks, x, r, _strides(x)[0], first, heads)
