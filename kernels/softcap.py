"""A soft cap (Bello et al., arXiv:1611.09940; Gemma Team, arXiv:2408.00118), of the logits of a model.

    y = cap tanh(x / cap);   dx = dy (1 - (y / cap)^2)

Shapes: x, y of any shape. Roundings: y once, and dx once. The gradient reads y as it was rounded.
Order: no sums. torch's tanh has the same bits wherever an element lies. The GPU's is softcap_triton.py. The
slope is made of torch's products and sums, which are exact on every device.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cap):
        y = _forward(x, cap)
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return (dy.to(accumulate_dtype(y.dtype)) * softcap_slope(y, ctx.cap)).to(y.dtype), None


def _forward(x: torch.Tensor, cap: float) -> torch.Tensor:
    if on_triton(x):
        from .softcap_triton import softcap_fwd

        return softcap_fwd(x, cap)
    return (x.to(accumulate_dtype(x.dtype)) / cap).tanh_().mul_(cap).to(x.dtype)


def softcap_slope(y: torch.Tensor, cap: float) -> torch.Tensor:
    """The derivative of a capped y by x, in fp32."""
    t = y.to(accumulate_dtype(y.dtype)) / cap
    return t.mul_(t).neg_().add_(1.0)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(x / cap), like x; x itself where the cap is 0.0. Raises ValueError on a bad dtype or cap."""
    check_dtype("softcap", x=x)
    if cap < 0.0:
        raise ValueError(f"softcap: cap ({cap}) must be positive, or 0.0 for none")
    if not cap:
        return x
    return _Softcap.apply(x, cap) if torch.is_grad_enabled() else _forward(x, cap)
