"""Triton kernels of relu2_mul.py: the same arithmetic, element by element; the bits are the reference's."""

import torch
import triton
import triton.language as tl
from zerokl.kernels.launch import ceil_div, dense, launch

# Elements of one program. Free: no element depends on another. 8 of each half for every thread.
TILE, WARPS = 1024, 4


@triton.jit
def _relu2_mul_fwd(gu_ptr, y_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    gf = g.to(tl.float32)
    r = tl.where(gf <= 0.0, 0.0, gf)
    y = (r * r).to(g.dtype).to(tl.float32) * u
    tl.store(y_ptr + row * width + cols, y.to(g.dtype), mask=mask)


@triton.jit
def _relu2_mul_bwd(dy_ptr, gu_ptr, dgu_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    gf = g.to(tl.float32)
    r = tl.where(gf <= 0.0, 0.0, gf)
    dg = 2.0 * r * u * dy
    du = (r * r).to(g.dtype).to(tl.float32) * dy  # relu(g)^2 as rounded in the forward
    tl.store(dgu_ptr + row * 2 * width + cols, dg.to(g.dtype), mask=mask)
    tl.store(dgu_ptr + row * 2 * width + width + cols, du.to(g.dtype), mask=mask)


def relu2_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """gu [T, 2 I] -> [T, I]."""
    T, width = gu.shape[0], gu.shape[1] // 2
    y = torch.empty(T, width, dtype=gu.dtype, device=gu.device)
    grid = (T, ceil_div(width, TILE))
    launch(_relu2_mul_fwd, grid, dense(gu), y, width, TILE=TILE, num_warps=WARPS)
    return y


def relu2_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """dgu [T, 2 I]."""
    T, width = dy.shape
    dgu = torch.empty(gu.shape, dtype=gu.dtype, device=gu.device)
    grid = (T, ceil_div(width, TILE))
    launch(_relu2_mul_bwd, grid, dense(dy), dense(gu), dgu, width, TILE=TILE, num_warps=WARPS)
    return dgu
