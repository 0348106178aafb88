"""Gated SiLU (SwiGLU's activation; Shazeer, 2020, arXiv:2002.05202).

    y = silu(g) u,    silu(g) = g s,    s = 1 / (1 + exp(-g))
    dg = dy u s (1 + g (1 - s)),    du = dy silu(g)

Input gu [T, 2 I] holds g in its first half and u in its second; y [T, I].
Roundings: silu(g) once, then the product once (as vLLM's silu_and_mul and transformers' MLP do); dg and du once each.
silu is g / (1 + exp(-g)) in fp32: torch's own silu gives other bits in the scalar tail than in the vector body.
"""

import torch

from .grad import accumulate_dtype, check_dtype


def silu_mul_ref(gu: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    acc = accumulate_dtype(gu.dtype)
    g, u = gu.chunk(2, dim=1)
    gf = g.to(acc)
    silu = (gf / torch.exp(-gf).add_(1.0)).to(gu.dtype)
    return silu * u


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu):
        ctx.save_for_backward(gu)
        return silu_mul_ref(gu)

    @staticmethod
    def backward(ctx, dy):
        (gu,) = ctx.saved_tensors
        acc = accumulate_dtype(gu.dtype)
        g, u = (t.to(acc) for t in gu.chunk(2, dim=1))
        dyf = dy.to(acc)
        s = torch.exp(-g).add_(1.0).reciprocal_()
        silu = g * s
        slope = (1.0 - s).mul_(silu).add_(s)  # s (1 + g (1 - s))
        dgu = torch.empty_like(gu)
        dg, du = dgu.chunk(2, dim=1)
        dg.copy_(slope.mul_(u).mul_(dyf))
        du.copy_(silu.to(gu.dtype).to(acc).mul_(dyf))  # silu rounded to the dtype, as in the forward
        return dgu


def silu_mul(gu: torch.Tensor) -> torch.Tensor:
    """silu(gu[:, :I]) * gu[:, I:]. gu [T, 2 I] -> [T, I]. Raises ValueError on a bad shape or dtype."""
    check_dtype("silu_mul", gu=gu)
    if gu.dim() != 2 or gu.shape[1] % 2:
        raise ValueError(f"silu_mul: gu {tuple(gu.shape)} must be [T, 2 I]")
    return _SiluMul.apply(gu) if torch.is_grad_enabled() else silu_mul_ref(gu)
