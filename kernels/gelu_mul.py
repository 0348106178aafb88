"""Gated GELU in its tanh form (GEGLU; Hendrycks & Gimpel, arXiv:1606.08415; Shazeer, arXiv:2002.05202).

    y = gelu(g) u,    gelu(g) = g (1 + tanh(z / 2)) / 2 = g s,    s = 1 / (1 + exp(-z))
    z = g (a + b g^2),    a = sqrt(8 / pi),    b = 0.044715 a
    dg = dy u s (1 + g (1 - s) (a + 3 b g^2)),    du = dy gelu(g)

The form with exp loses no digits where g is far below 0, and is silu's but for z: silu has z = g. g^2 counts
1024 at most, so that nothing overflows: beyond, s is 0 or 1 in fp32.

Shapes: gu [T, 2 I] holds g in its first half and u in its second half; y [T, I].
Roundings: gelu(g) is rounded once, and then the product once (as in transformers' MLP). dg and du are rounded
once each.
"""

import torch

from . import silu_mul_cpp
from .backend import on_cpp, on_triton
from .gelu import LARGEST_E, LARGEST_SQUARE, A, B
from .grad import accumulate_dtype, check_dtype
from .silu_mul import row_passes


def _exp(g: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """exp(-z), of g in fp32 and its square."""
    return torch.exp(-square.mul(B).add_(A).mul_(g))


def gelu_mul_ref(gu: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    y = gu.new_empty(gu.shape[0], gu.shape[1] // 2)
    for rows in row_passes(gu):
        g, u = gu[rows].chunk(2, dim=1)
        gf = g.to(accumulate_dtype(gu.dtype))
        square = (gf * gf).clamp_(max=LARGEST_SQUARE)
        torch.mul((gf / _exp(gf, square).add_(1.0)).to(gu.dtype), u, out=y[rows])
    return y


def gelu_mul_bwd_ref(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    acc = accumulate_dtype(gu.dtype)
    dgu = torch.empty_like(gu)
    for rows in row_passes(gu):
        g, u = (half.to(acc) for half in gu[rows].chunk(2, dim=1))
        dyf = dy[rows].to(acc)
        square = (g * g).clamp_(max=LARGEST_SQUARE)
        e = _exp(g, square)
        s = e.add(1.0).reciprocal_()
        gelu = g * s
        slope = e.clamp_(max=LARGEST_E).mul_(s).mul_(gelu).mul_(square.mul_(3.0 * B).add_(A)).add_(s)
        dg, du = dgu[rows].chunk(2, dim=1)
        dg.copy_(slope.mul_(u).mul_(dyf))
        du.copy_(gelu.to(gu.dtype).to(acc).mul_(dyf))  # gelu rounded to the dtype, as in the forward
    return dgu


def _forward(gu: torch.Tensor) -> torch.Tensor:
    if on_cpp(gu):
        return silu_mul_cpp.gelu_mul_fwd(gu)
    if not on_triton(gu):
        return gelu_mul_ref(gu)
    from .gelu_mul_triton import gelu_mul_fwd

    return gelu_mul_fwd(gu)


class _GeluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu):
        ctx.save_for_backward(gu)
        return _forward(gu)

    @staticmethod
    def backward(ctx, dy):
        (gu,) = ctx.saved_tensors
        if on_cpp(gu):
            return silu_mul_cpp.gelu_mul_bwd(dy, gu)
        if not on_triton(gu):
            return gelu_mul_bwd_ref(dy, gu)
        from .gelu_mul_triton import gelu_mul_bwd

        return gelu_mul_bwd(dy, gu)


def gelu_mul(gu: torch.Tensor) -> torch.Tensor:
    """gelu(gu[:, :I]) * gu[:, I:]. gu [T, 2 I] -> [T, I]. Raises ValueError on a bad shape or dtype."""
    check_dtype("gelu_mul", gu=gu)
    if gu.dim() != 2 or gu.shape[1] % 2:
        raise ValueError(f"gelu_mul: gu {tuple(gu.shape)} must be [T, 2 I]")
    return _GeluMul.apply(gu) if torch.is_grad_enabled() else _forward(gu)
