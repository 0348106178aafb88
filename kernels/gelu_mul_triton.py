"""Triton kernels of gelu_mul.py.

Roundings: everything is in fp32; gelu is rounded to the dtype, and then the product. dg and du are rounded
once each. exp is CUDA's expf, and divisions are correctly rounded, as in silu_mul_triton.py.
Order: no sums. Each element depends on its own pair only.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .gelu import LARGEST_E, LARGEST_SQUARE, A, B
from .silu_mul_triton import gated_bwd, gated_fwd


@triton.jit
def _gelu_mul_fwd(
    gu_ptr, y_ptr, width, A: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0)
    gf = g.to(tl.float32)
    square = tl.minimum(gf * gf, LARGEST)
    gelu = tl.div_rn(gf, 1.0 + expf(-gf * tl.fma(square, B, A))).to(g.dtype)
    y = gelu.to(tl.float32) * u.to(tl.float32)
    tl.store(y_ptr + row * width + cols, y.to(g.dtype), mask=mask)


@triton.jit
def _gelu_mul_bwd(
    dy_ptr,
    gu_ptr,
    dgu_ptr,
    width,
    A: tl.constexpr,
    B: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_E: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    gf = g.to(tl.float32)
    square = tl.minimum(gf * gf, LARGEST)
    e = expf(-gf * tl.fma(square, B, A))
    s = tl.div_rn(1.0, 1.0 + e)
    rest = tl.minimum(e, LARGEST_E) * s
    gelu = tl.div_rn(gf, 1.0 + e)
    dg = (s + rest * gelu * tl.fma(square, 3.0 * B, A)) * u * dy
    du = gelu.to(g.dtype).to(tl.float32) * dy  # gelu as rounded in the forward
    tl.store(dgu_ptr + row * 2 * width + cols, dg.to(g.dtype), mask=mask)
    tl.store(dgu_ptr + row * 2 * width + width + cols, du.to(g.dtype), mask=mask)


_CONSTANTS = {"A": A, "B": B, "LARGEST": LARGEST_SQUARE}


def gelu_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """gelu(gu[:, :I]) * gu[:, I:]. gu [T, 2 I] -> [T, I]."""
    return gated_fwd(_gelu_mul_fwd, gu, **_CONSTANTS)


def gelu_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    return gated_bwd(_gelu_mul_bwd, dy, gu, LARGEST_E=LARGEST_E, **_CONSTANTS)
