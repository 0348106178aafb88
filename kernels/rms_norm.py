"""Root-mean-square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467), alone and after a residual addition.

    rms_norm:      y = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    add_rms_norm:  s = x + residual,    y = rms_norm(s, w)

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dw = sum_t dy xh;   the residual's gradient adds to dx.

x, residual, s, y [T, D]; w [D]; r [T] in fp32. rms_norm also takes [T, H, D] for the per-head norms of Qwen3.
Roundings: s once, before the norm reads it (as vLLM's fused_add_rms_norm does); y once, the weight being multiplied in
fp32 (as vLLM's batch-invariant Triton kernel does); dx once, the residual's gradient added in fp32.
The mean is one sum along the row: D is static, so its order is.
"""

import torch

from .grad import accumulate_dtype, check_dtype, grad_buffer, returned_grad
from .order import Blocks, add_columns, one_sequence, sum_row, tree_sum


def rms_norm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only, x [T, D]. Returns y [T, D] and r [T, 1]."""
    xf = x.to(accumulate_dtype(x.dtype))
    # 1 / sqrt and not rsqrt: both are rounded exactly, rsqrt is approximate and differs between vector widths.
    r = sum_row(xf * xf).div_(x.shape[1]).add_(eps).sqrt_().reciprocal_().unsqueeze(1)
    return (xf * r).mul_(w.to(xf.dtype)).to(x.dtype), r


def _rms_norm_bwd(dy, x, r, w, blocks, heads):
    """dx in fp32 and the weight's gradient. All of x, dy [T * heads, D]."""
    acc_dtype = r.dtype
    dyf, xh = dy.to(acc_dtype), x.to(acc_dtype) * r
    dyw = dyf * w.to(acc_dtype)
    acc = grad_buffer(w)
    dw = (dyf * xh).view(-1, heads, x.shape[1])
    add_columns(acc, tree_sum(dw, 1), blocks)
    dx = dyw.sub_(xh.mul_(sum_row(dyw * xh).div_(x.shape[1]).unsqueeze(1))).mul_(r)
    return dx, returned_grad(w, acc)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps, blocks):
        rows = x.reshape(-1, x.shape[-1])
        y, r = rms_norm_ref(rows, w, eps)
        ctx.save_for_backward(rows, r)
        ctx.w, ctx.blocks, ctx.shape = w, blocks, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        rows, r = ctx.saved_tensors
        heads = rows.shape[0] // ctx.shape[0]
        dx, dw = _rms_norm_bwd(dy.reshape(rows.shape), rows, r, ctx.w, ctx.blocks, heads)
        return dx.to(dy.dtype).view(ctx.shape), dw, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, blocks):
        s = x + residual
        y, r = rms_norm_ref(s, w, eps)
        ctx.save_for_backward(s, r)
        ctx.w, ctx.blocks = w, blocks
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        s, r = ctx.saved_tensors
        dx, dw = _rms_norm_bwd(dy, s, r, ctx.w, ctx.blocks, heads=1)
        dx = (dx + ds.to(dx.dtype)).to(dy.dtype)
        return dx, dx, dw, None, None


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, blocks: Blocks | None = None) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis. x [T, D] or [T, H, D], w [D] -> the shape of x.

    `blocks`: token blocks in whose order dw is summed (order.token_blocks). Raises ValueError on a bad shape or dtype.
    """
    _check("rms_norm", x, w, eps)
    if not torch.is_grad_enabled():
        return rms_norm_ref(x.reshape(-1, x.shape[-1]), w, eps)[0].view(x.shape)
    return _RMSNorm.apply(x, w, eps, one_sequence(x, blocks))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float, blocks: Blocks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual; returns (rms_norm(s, w), s). x, residual [T, D], w [D].

    Raises ValueError on a bad shape or dtype.
    """
    _check("add_rms_norm", x, w, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype or x.dim() != 2:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} {residual.dtype} must be like x {tuple(x.shape)} {x.dtype}, [T, D]"
        )
    if not torch.is_grad_enabled():
        s = x + residual
        return rms_norm_ref(s, w, eps)[0], s
    return _AddRMSNorm.apply(x, residual, w, eps, one_sequence(x, blocks))


def _check(op: str, x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    check_dtype(op, x=x, w=w)
    if x.dim() not in (2, 3):
        raise ValueError(f"{op}: x {tuple(x.shape)} must be [T, D] or [T, H, D]")
    if w.shape != x.shape[-1:]:
        raise ValueError(f"{op}: x.shape[-1] ({x.shape[-1]}) must equal w.shape[0] ({w.shape[0]})")
    if not eps > 0:
        raise ValueError(f"{op}: eps ({eps}) must be positive")
