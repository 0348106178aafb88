"""A soft cap on a GPU, of logits and inside attention: one tanh for all. softcap.py has the equation.

    |x| < 0.55: tanh x = x + x z P(z), z = x^2
    beyond:     tanh x = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)

CUDA's tanhf is code of a library that comes with the compiler, so its bits are those of a version. Here every
step is written out: fma, correctly rounded divisions, and the GPU's exp2, which attention takes too. P has
degree 4: a minimax fit with a relative error of 1e-9. Together they are within 2 ulp of fp64 in fp32.

Shapes: x, y of any shape, contiguous. Roundings: everything is in fp32; y is rounded once.
Order: no sums. Each element depends on itself only.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch

TILE, WARPS = 1024, 4
_MINUS_2_LOG2E = tl.constexpr(-2.8853900817779268)


@triton.jit
def tanh(x):
    """tanh(x) in fp32."""
    z, magnitude = x * x, tl.abs(x)
    p = tl.fma(z, -0.006274135317653418, 0.021071601659059525)
    p = tl.fma(p, z, -0.05385228991508484)
    p = tl.fma(p, z, 0.13332585990428925)
    p = tl.fma(p, z, -0.33333316445350647)
    e = tl.exp2(magnitude * _MINUS_2_LOG2E)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(magnitude < 0.55, tl.fma(p * z, x, x), tl.where(x < 0.0, -far, far))


@triton.jit
def _softcap(x_ptr, y_ptr, n, cap, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    y = tanh(tl.div_rn(x, tl.full([TILE], cap, tl.float32))) * cap
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < n)


def softcap_fwd(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap), contiguous, in the shape and dtype of x."""
    x = dense(x)
    y = torch.empty_like(x)
    if x.numel():
        launch(_softcap, (ceil_div(x.numel(), TILE),), x, y, x.numel(), cap, TILE=TILE, num_warps=WARPS)
    return y
