"""One key of a token for all heads:  y_th = x_t,   dx_t = sum_h dy_th.

Shapes: x [T, R], y [T, H, R]. Roundings: dx is added up in fp32 (fp64 for fp64) and rounded once.
Order: head after head. torch's own sum may cut this axis by the number of rows, so it is not used.
"""

import torch

from .grad import accumulate_dtype, check_dtype


class _ShareKey(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, heads):
        return x.unsqueeze(1).repeat(1, heads, 1)

    @staticmethod
    def backward(ctx, dy):
        acc = accumulate_dtype(dy.dtype)
        first, *rest = dy.unbind(1)
        dx = first.to(acc, copy=True)
        for head in rest:
            dx += head.to(acc)
        return dx.to(dy.dtype), None


def share_key(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [T, R] -> [T, heads, R]. Raises ValueError on a bad shape or dtype."""
    check_dtype("share_key", x=x)
    if x.dim() != 2 or heads < 1:
        raise ValueError(f"share_key: x {tuple(x.shape)} must be [T, R], and heads ({heads}) positive")
    return _ShareKey.apply(x, heads)
