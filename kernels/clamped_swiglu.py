"""Clamped SwiGLU, the activation of the experts of gpt-oss (OpenAI, arXiv:2508.10925).

    y = (u' + 1) g' s,    g' = min(g, L),    u' = max(-L, min(u, L)),    s = 1 / (1 + exp(-a g'))
    dg = dy (u' + 1) s (1 + a g' (1 - s)) where g <= L, else 0;    du = dy g' s where -L <= u <= L, else 0

Shapes: gu [T, 2 I] holds g in its even columns and u in its odd ones, as the checkpoints have them; y [T, I].
Roundings: y, dg and du once each. Of the limit itself the gradient goes through, as torch's clamp has it.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .silu_mul import row_passes


def _parts(gu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """g and u in the dtype of the computation, [T, I] each."""
    wide = gu.to(accumulate_dtype(gu.dtype))
    return wide[:, ::2].contiguous(), wide[:, 1::2].contiguous()


def clamped_swiglu_ref(gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Forward only."""
    y = gu.new_empty(gu.shape[0], gu.shape[1] // 2)
    for rows in row_passes(gu):
        g, u = _parts(gu[rows])
        g.clamp_(max=limit)
        g.div_(torch.exp(g * -alpha).add_(1.0))
        y[rows] = g.mul_(u.clamp_(-limit, limit).add_(1.0)).to(gu.dtype)
    return y


def clamped_swiglu_bwd_ref(dy: torch.Tensor, gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]. dy [T, I], gu [T, 2 I]."""
    dgu = torch.empty_like(gu)
    for rows in row_passes(gu):
        g, u = _parts(gu[rows])
        above, outside = g > limit, u.abs() > limit
        g.clamp_(max=limit)
        dyf = dy[rows].to(g.dtype)
        s = torch.exp(g * -alpha).add_(1.0).reciprocal_()
        swish = g * s
        slope = (1.0 - s).mul_(swish).mul_(alpha).add_(s)  # s (1 + a g (1 - s))
        slope.mul_(u.clamp_(-limit, limit).add_(1.0)).mul_(dyf).masked_fill_(above, 0.0)
        dgu[rows, ::2] = slope.to(gu.dtype)
        dgu[rows, 1::2] = swish.mul_(dyf).masked_fill_(outside, 0.0).to(gu.dtype)
    return dgu


def _forward(gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    if not on_triton(gu):
        return clamped_swiglu_ref(gu, alpha, limit)
    from .clamped_swiglu_triton import clamped_swiglu_fwd

    return clamped_swiglu_fwd(gu, alpha, limit)


class _ClampedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu, alpha, limit):
        ctx.save_for_backward(gu)
        ctx.alpha, ctx.limit = alpha, limit
        return _forward(gu, alpha, limit)

    @staticmethod
    def backward(ctx, dy):
        (gu,) = ctx.saved_tensors
        if not on_triton(gu):
            return clamped_swiglu_bwd_ref(dy, gu, ctx.alpha, ctx.limit), None, None
        from .clamped_swiglu_triton import clamped_swiglu_bwd

        return clamped_swiglu_bwd(dy, gu, ctx.alpha, ctx.limit), None, None


def clamped_swiglu(gu: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gu [T, 2 I] -> [T, I]. Raises ValueError on a bad shape or dtype."""
    check_dtype("clamped_swiglu", gu=gu)
    if gu.dim() != 2 or gu.shape[1] % 2:
        raise ValueError(f"clamped_swiglu: gu {tuple(gu.shape)} must be [T, 2 I]")
    if not torch.is_grad_enabled():
        return _forward(gu, alpha, limit)
    return _ClampedSwiglu.apply(gu, alpha, limit)
