"""Triton kernels of clamped_swiglu.py, which has the equations.

Roundings: everything is in fp32; y, dg and du are rounded once each. exp is CUDA's expf, and divisions are
correctly rounded, as in silu_mul_triton.py. No product is fused with an addition, so all but exp has the bits
of the reference. A NaN stays one through the clamps, as in torch.
Order: no sums. Each element depends on its own pair only.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .silu_mul_triton import gated_bwd, gated_fwd


@triton.jit
def _pairs(gu_ptr, width, TILE: tl.constexpr):
    """g and u of a tile in fp32, [TILE] each: a row holds them one after the other."""
    col = tl.program_id(1) * 2 * TILE + tl.arange(0, 2 * TILE)
    row = tl.program_id(0).to(tl.int64) * 2 * width
    gu = tl.load(gu_ptr + row + col, mask=col < 2 * width, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(gu, [TILE, 2]))


@triton.jit
def _clamped_swiglu_fwd(gu_ptr, y_ptr, width, ALPHA: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    g, u = _pairs(gu_ptr, width, TILE)
    g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    u = tl.clamp(u, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    y = tl.div_rn(g, 1.0 + expf(g * -ALPHA)) * (u + 1.0)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=cols < width)


@triton.jit
def _clamped_swiglu_bwd(
    dy_ptr, gu_ptr, dgu_ptr, width, ALPHA: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    g, u = _pairs(gu_ptr, width, TILE)
    dy = tl.load(dy_ptr + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    is_above, is_outside = g > LIMIT, tl.abs(u) > LIMIT
    g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    u = tl.clamp(u, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    s = tl.div_rn(1.0, 1.0 + expf(g * -ALPHA))
    swish = g * s
    slope = (1.0 - s) * swish * ALPHA + s  # s (1 + a g (1 - s))
    dg = tl.where(is_above, 0.0, slope * (u + 1.0) * dy)
    du = tl.where(is_outside, 0.0, swish * dy)
    out = tl.program_id(1) * 2 * TILE + tl.arange(0, 2 * TILE)
    dgu = tl.interleave(dg, du).to(dgu_ptr.dtype.element_ty)
    tl.store(dgu_ptr + row * 2 * width + out, dgu, mask=out < 2 * width)


def clamped_swiglu_fwd(gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """y [T, I] of gu [T, 2 I]."""
    return gated_fwd(_clamped_swiglu_fwd, gu, ALPHA=alpha, LIMIT=limit, enable_fp_fusion=False)


def clamped_swiglu_bwd(dy: torch.Tensor, gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    return gated_bwd(_clamped_swiglu_bwd, dy, gu, ALPHA=alpha, LIMIT=limit, enable_fp_fusion=False)
