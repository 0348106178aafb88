"""The output of attention behind a gate.

    y = x g,   g = sigmoid(z) = 1 / (1 + exp(-z))
    dx = dy g,   dz = dy x g (1 - g)

Source: gated attention (arXiv:2505.06708), transformers' Qwen3_5Attention, which rounds g, too.

Shapes: x, z, y [T, N].
Roundings: y, dx and dz once each.
Order: no sums. On a GPU these are torch's operations, too, each of which goes element by element.
"""

import torch

from .grad import accumulate_dtype, check_dtype


def sigmoid_mul_ref(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    acc = accumulate_dtype(x.dtype)
    return (x.to(acc) / torch.exp(-z.to(acc)).add_(1.0)).to(x.dtype)


def sigmoid_mul_bwd_ref(
    dy: torch.Tensor, x: torch.Tensor, z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dz, [T, N] each."""
    acc = accumulate_dtype(x.dtype)
    g, dyf = torch.exp(-z.to(acc)).add_(1.0).reciprocal_(), dy.to(acc)
    return (dyf * g).to(x.dtype), (dyf * x.to(acc) * (g * (1.0 - g))).to(z.dtype)


class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(x, z)
        return sigmoid_mul_ref(x, z)

    @staticmethod
    def backward(ctx, dy):
        return sigmoid_mul_bwd_ref(dy, *ctx.saved_tensors)


def sigmoid_mul(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x sigmoid(z). x, z [T, N] -> [T, N]. Raises ValueError on a bad shape or dtype."""
    check_dtype("sigmoid_mul", x=x, z=z)
    if x.dim() != 2 or z.shape != x.shape:
        raise ValueError(f"sigmoid_mul: x {tuple(x.shape)} and z {tuple(z.shape)} must be [T, N]")
    return _SigmoidMul.apply(x, z) if torch.is_grad_enabled() else sigmoid_mul_ref(x, z)
