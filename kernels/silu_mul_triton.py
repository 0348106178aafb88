"""Triton kernels of silu_mul.py, with the arithmetic of vLLM's CUDA silu_and_mul (csrc, activation_kernels).

Forward: silu = g / (1 + exp(-g)) in fp32, with CUDA's expf and a correctly rounded division. Then
silu (u + 0.0): vLLM adds its `beta` of 0, which turns a -0.0 of u into a +0.0. libdevice's expf flushes
subnormals to zero here, and nvcc's expf does not. The difference is not visible next to the 1 that is added.
On an H100 the forward has the bits of vLLM's compiled operation in bf16, fp16 and fp32.

Roundings: silu is rounded to the dtype, and then the product. dg and du are rounded once each.
Order: no sums. Each element depends on its own pair only.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .launch import ceil_div, dense, launch

# Elements of one program, and its warps. They decide no bit: no element depends on another. A thread has 8
# elements of each half, which makes whole 16-byte accesses of 16-bit numbers.
TILE, WARPS = 1024, 4


@triton.jit
def _silu_mul_fwd(gu_ptr, y_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0)
    gf = g.to(tl.float32)
    silu = tl.div_rn(gf, 1.0 + expf(-gf)).to(g.dtype)
    y = silu.to(tl.float32) * (u.to(tl.float32) + 0.0)
    tl.store(y_ptr + row * width + cols, y.to(g.dtype), mask=mask)


@triton.jit
def _silu_mul_bwd(dy_ptr, gu_ptr, dgu_ptr, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    g = tl.load(gu_ptr + row * 2 * width + cols, mask=mask, other=0.0)
    u = tl.load(gu_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    gf = g.to(tl.float32)
    e = expf(-gf)
    s = tl.div_rn(1.0, 1.0 + e)
    silu = tl.div_rn(gf, 1.0 + e)
    dg = (s + (1.0 - s) * silu) * u * dy
    du = silu.to(g.dtype).to(tl.float32) * dy  # silu as rounded in the forward
    tl.store(dgu_ptr + row * 2 * width + cols, dg.to(g.dtype), mask=mask)
    tl.store(dgu_ptr + row * 2 * width + width + cols, du.to(g.dtype), mask=mask)


def silu_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """silu(gu[:, :I]) * gu[:, I:]. gu [T, 2 I] -> [T, I]."""
    return gated_fwd(_silu_mul_fwd, gu)


def silu_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    return gated_bwd(_silu_mul_bwd, dy, gu)


def gated_fwd(kernel: Any, gu: torch.Tensor, **constants: float) -> torch.Tensor:
    """A gate's y [T, I] of gu [T, 2 I]. constants: the kernel's, beside TILE."""
    T, width = gu.shape[0], gu.shape[1] // 2
    y = torch.empty(T, width, dtype=gu.dtype, device=gu.device)
    grid = (T, ceil_div(width, TILE))
    launch(kernel, grid, dense(gu), y, width, TILE=TILE, num_warps=WARPS, **constants)
    return y


def gated_bwd(kernel: Any, dy: torch.Tensor, gu: torch.Tensor, **constants: float) -> torch.Tensor:
    """A gate's gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    T, width = dy.shape
    dgu = torch.empty(gu.shape, dtype=gu.dtype, device=gu.device)
    grid = (T, ceil_div(width, TILE))
    launch(kernel, grid, dense(dy), dense(gu), dgu, width, TILE=TILE, num_warps=WARPS, **constants)
    return dgu
