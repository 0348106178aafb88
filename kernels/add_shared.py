"""The output of a shared expert, behind its gate, added to that of the chosen experts.

    y = e + g s,   g = sigmoid(z) = 1 / (1 + exp(-z))          one z for each token
    de = dy,   ds = g dy,   dz = g (1 - g) sum_d dy_d s_d

e is what the chosen experts give (combine_experts.py): their slots were added and rounded before. Source:
Qwen2-MoE (arXiv:2407.10671), transformers' Qwen2MoeSparseMoeBlock. transformers rounds g and g s too.

Shapes: e, s, y [T, D]; z [T, 1], all in one dtype.
Roundings: g, g s and the sum are in fp32; y is rounded once. ds and dz are rounded once each.
Order: the sum of dz is one sum along the row, whose order depends on D only.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .order import sum_row


def add_shared_ref(e_TD: torch.Tensor, s_TD: torch.Tensor, z_T1: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    acc = accumulate_dtype(e_TD.dtype)
    return (_gate(z_T1.to(acc)) * s_TD.to(acc)).add_(e_TD.to(acc)).to(e_TD.dtype)


def add_shared_bwd_ref(
    dy_TD: torch.Tensor, s_TD: torch.Tensor, z_T1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ds [T, D] and dz [T, 1]."""
    acc, dtype = accumulate_dtype(dy_TD.dtype), s_TD.dtype
    g, dy = _gate(z_T1.to(acc)), dy_TD.to(acc)
    dz = g * (1.0 - g) * sum_row(dy * s_TD.to(acc)).unsqueeze(1)
    return (g * dy).to(dtype), dz.to(dtype)


def _gate(z: torch.Tensor) -> torch.Tensor:
    return 1.0 / torch.exp(-z).add_(1.0)


def _forward(e: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if not on_triton(e):
        return add_shared_ref(e, s, z)
    from .add_shared_triton import add_shared_fwd

    return add_shared_fwd(e, s, z)


class _AddShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, s, z):
        ctx.save_for_backward(s, z)
        return _forward(e, s, z)

    @staticmethod
    def backward(ctx, dy):
        s, z = ctx.saved_tensors
        if not on_triton(dy):
            return dy, *add_shared_bwd_ref(dy, s, z)
        from .add_shared_triton import add_shared_bwd

        return dy, *add_shared_bwd(dy, s, z)


def add_shared(e: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """e + sigmoid(z) s. e, s [T, D], z [T, 1] -> [T, D]. Raises ValueError on a bad shape or dtype."""
    check_dtype("add_shared", e=e, s=s, z=z)
    if e.dim() != 2 or s.shape != e.shape or z.shape != (e.shape[0], 1):
        raise ValueError(
            f"add_shared: e {tuple(e.shape)} and s {tuple(s.shape)} must be [T, D], and z {tuple(z.shape)} "
            "[T, 1]"
        )
    return _AddShared.apply(e, s, z) if torch.is_grad_enabled() else _forward(e, s, z)
