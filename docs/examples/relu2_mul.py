"""Gated squared ReLU (squared ReLU: So et al., "Primer", arXiv:2109.08668).

    y = relu(g)^2 u
    dg = 2 dy u relu(g),    du = dy relu(g)^2

Input gu [T, 2 I] holds g in its first half and u in its second; y [T, I].
Roundings: relu(g)^2 once, then the product once (as an MLP of transformers does); dg and du once each.
relu is written as a choice: of max(-0.0, 0.0) IEEE 754 leaves the sign open.
"""

import torch
from zerokl.kernels.backend import on_triton
from zerokl.kernels.grad import accumulate_dtype, check_dtype


def relu2_mul_ref(gu: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    r, u = _halves(gu)
    return ((r * r).to(gu.dtype).to(u.dtype) * u).to(gu.dtype)


def relu2_mul_bwd_ref(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """dgu [T, 2 I]."""
    r, u = _halves(gu)
    dyf = dy.to(u.dtype)
    dg = 2.0 * r * u * dyf
    du = (r * r).to(gu.dtype).to(u.dtype) * dyf  # relu(g)^2 as rounded in the forward
    return torch.cat([dg, du], dim=1).to(gu.dtype)


def _halves(gu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """relu(g) and u in the dtype that is computed in, [T, I] each. A NaN stays one."""
    g, u = gu.to(accumulate_dtype(gu.dtype)).chunk(2, dim=1)
    return torch.where(g <= 0.0, 0.0, g), u


def _forward(gu: torch.Tensor) -> torch.Tensor:
    if not on_triton(gu):
        return relu2_mul_ref(gu)
    from relu2_mul_triton import relu2_mul_fwd

    return relu2_mul_fwd(gu)


class _Relu2Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu):
        ctx.save_for_backward(gu)
        return _forward(gu)

    @staticmethod
    def backward(ctx, dy):
        (gu,) = ctx.saved_tensors
        if not on_triton(gu):
            return relu2_mul_bwd_ref(dy, gu)
        from relu2_mul_triton import relu2_mul_bwd

        return relu2_mul_bwd(dy, gu)


def relu2_mul(gu: torch.Tensor) -> torch.Tensor:
    """relu(gu[:, :I])^2 * gu[:, I:]. gu [T, 2 I] -> [T, I]. Raises ValueError on a bad shape or dtype."""
    check_dtype("relu2_mul", gu=gu)
    if gu.dim() != 2 or gu.shape[1] % 2:
        raise ValueError(f"relu2_mul: gu {tuple(gu.shape)} must be [T, 2 I]")
    return _Relu2Mul.apply(gu) if torch.is_grad_enabled() else _forward(gu)
