"""Gated SiLU (SwiGLU's activation; Shazeer, 2020, arXiv:2002.05202).

    y = silu(g) u,    silu(g) = g s,    s = 1 / (1 + exp(-g))
    dg = dy u s (1 + g (1 - s)),    du = dy silu(g)

silu is computed as g / (1 + exp(-g)) in fp32. torch's own silu gives other bits in the scalar tail than in
the vector body.

Shapes: gu [T, 2 I] holds g in its first half and u in its second half; y [T, I].
Roundings: silu(g) is rounded once, and then the product once (as in vLLM's silu_and_mul and in transformers'
MLP). dg and du are rounded once each.
"""

from collections.abc import Iterator

import torch

from . import silu_mul_cpp
from .backend import on_cpp, on_triton
from .grad import accumulate_dtype, check_dtype

# Elements of one pass, so few that its temporaries stay in a core's cache. The limit bounds memory only.
_PASS_ELEMENTS = 1 << 16


def silu_mul_ref(gu: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    acc = accumulate_dtype(gu.dtype)
    y = gu.new_empty(gu.shape[0], gu.shape[1] // 2)
    for rows in row_passes(gu):
        g, u = gu[rows].chunk(2, dim=1)
        gf = g.to(acc)
        torch.mul((gf / torch.exp(-gf).add_(1.0)).to(gu.dtype), u, out=y[rows])
    return y


def silu_mul_bwd_ref(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    acc = accumulate_dtype(gu.dtype)
    dgu = torch.empty_like(gu)
    for rows in row_passes(gu):
        g, u = (half.to(acc) for half in gu[rows].chunk(2, dim=1))
        dyf = dy[rows].to(acc)
        s = torch.exp(-g).add_(1.0).reciprocal_()
        silu = g * s
        slope = (1.0 - s).mul_(silu).add_(s)  # s (1 + g (1 - s))
        dg, du = dgu[rows].chunk(2, dim=1)
        dg.copy_(slope.mul_(u).mul_(dyf))
        du.copy_(silu.to(gu.dtype).to(acc).mul_(dyf))  # silu rounded to the dtype, as in the forward
    return dgu


def row_passes(gu: torch.Tensor) -> Iterator[slice]:
    """The rows of each pass over gu [T, 2 I]."""
    rows = max(1, 2 * _PASS_ELEMENTS // gu.shape[1])
    return (slice(a, a + rows) for a in range(0, gu.shape[0], rows))


def _forward(gu: torch.Tensor) -> torch.Tensor:
    if on_cpp(gu):
        return silu_mul_cpp.silu_mul_fwd(gu)
    if not on_triton(gu):
        return silu_mul_ref(gu)
    from .silu_mul_triton import silu_mul_fwd

    return silu_mul_fwd(gu)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu):
        ctx.save_for_backward(gu)
        return _forward(gu)

    @staticmethod
    def backward(ctx, dy):
        (gu,) = ctx.saved_tensors
        if on_cpp(gu):
            return silu_mul_cpp.silu_mul_bwd(dy, gu)
        if not on_triton(gu):
            return silu_mul_bwd_ref(dy, gu)
        from .silu_mul_triton import silu_mul_bwd

        return silu_mul_bwd(dy, gu)


def silu_mul(gu: torch.Tensor) -> torch.Tensor:
    """silu(gu[:, :I]) * gu[:, I:]. gu [T, 2 I] -> [T, I]. Raises ValueError on a bad shape or dtype."""
    check_dtype("silu_mul", gu=gu)
    if gu.dim() != 2 or gu.shape[1] % 2:
        raise ValueError(f"silu_mul: gu {tuple(gu.shape)} must be [T, 2 I]")
    return _SiluMul.apply(gu) if torch.is_grad_enabled() else _forward(gu)
