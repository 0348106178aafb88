"""Root-mean-square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467): alone, per head, after a residual addition.

    rms_norm:      y = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    add_rms_norm:  s = x + residual,    y = rms_norm(s, w)

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dw = sum_t dy xh;   the residual's gradient adds to dx.

x, residual, s, y [T, D]; w [D]; r [T, 1] in fp32. rms_norm also takes [T, H, D]; qk_norm does so with one weight for the query
heads and one for the key heads (Qwen3).
Roundings: s once, before the norm reads it (as vLLM's fused_add_rms_norm does); y once, the weight being multiplied in
fp32 (as vLLM's batch-invariant Triton kernel does); dx once, the residual's gradient added in fp32.
The mean is one sum along the row: D is static, so its order is.
"""

import torch

from .grad import accumulate_dtype, check_dtype, grad_buffer, returned_grad
from .order import Blocks, add_columns, one_sequence, sum_row, tree_sum


def rms_norm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only, x [T, D] with w [D], or x [T, H, D] with w [D] or [H, D]. Returns y like x, and r [..., 1] in fp32."""
    xf = x.to(accumulate_dtype(x.dtype))
    # 1 / sqrt and not rsqrt: both are rounded exactly, rsqrt is approximate and differs between vector widths.
    r = _sum_last(xf * xf).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()
    return (xf * r).mul_(w.to(xf.dtype)).to(x.dtype), r


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """sum_row for any leading shape, the last axis kept as 1."""
    return sum_row(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def _rms_norm_bwd(dy, x, r, w) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, and each row's share of dw, both like x in fp32."""
    dyf, xh = dy.to(r.dtype), x.to(r.dtype) * r
    dw = dyf * xh
    dyw = dyf * w.to(r.dtype)
    mean = _sum_last(dyw * xh).div_(x.shape[-1])
    return dyw.sub_(xh.mul_(mean)).mul_(r), dw


def _add_weight_grad(w: torch.Tensor, dw: torch.Tensor, blocks: Blocks) -> torch.Tensor | None:
    """Sum dw [T, D] or [T, H, D] over heads and tokens into the gradient of w [D]."""
    acc = grad_buffer(w)
    add_columns(acc, dw if dw.dim() == 2 else tree_sum(dw, 1), blocks)
    return returned_grad(w, acc)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps, blocks):
        y, r = rms_norm_ref(x, w, eps)
        ctx.save_for_backward(x, r)
        ctx.w, ctx.blocks = w, blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        dx, dw = _rms_norm_bwd(dy, x, r, ctx.w)
        return dx.to(dy.dtype), _add_weight_grad(ctx.w, dw, ctx.blocks), None, None


class _QKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, wk, heads, eps, blocks):
        w = _head_weights(wq, wk, heads, x.shape[1])
        y, r = rms_norm_ref(x, w, eps)
        ctx.save_for_backward(x, r, w)
        ctx.wq, ctx.wk, ctx.heads, ctx.blocks = wq, wk, heads, blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r, w = ctx.saved_tensors
        dx, dw = _rms_norm_bwd(dy, x, r, w)
        dwq = _add_weight_grad(ctx.wq, dw[:, : ctx.heads], ctx.blocks)
        dwk = _add_weight_grad(ctx.wk, dw[:, ctx.heads :], ctx.blocks)
        return dx.to(dy.dtype), dwq, dwk, None, None, None


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
        dx, dw = _rms_norm_bwd(dy, s, r, ctx.w)
        dx = dx.add_(ds.to(dx.dtype)).to(dy.dtype)
        return dx, dx, _add_weight_grad(ctx.w, dw, ctx.blocks), None, None


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, blocks: Blocks | None = None) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis. x [T, D] or [T, H, D], w [D] -> the shape of x.

    `blocks`: token blocks in whose order dw is summed (order.token_blocks). Raises ValueError on a bad shape or dtype.
    """
    _check("rms_norm", x, w, eps)
    if not torch.is_grad_enabled():
        return rms_norm_ref(x, w, eps)[0]
    return _RMSNorm.apply(x, w, eps, one_sequence(x, blocks))


def qk_norm(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, heads: int, eps: float, blocks: Blocks | None = None) -> torch.Tensor:
    """rms_norm of each head of x [T, H, D]: the first `heads` (queries) with wq [D], the others (keys) with wk [D]. -> [T, H, D].

    Raises ValueError on a bad shape or dtype.
    """
    _check("qk_norm", x, wq, eps)
    _check("qk_norm", x, wk, eps)
    if x.dim() != 3 or not 0 < heads < x.shape[1]:
        raise ValueError(f"qk_norm: x {tuple(x.shape)} must be [T, H, D] with more than heads ({heads}) heads")
    if not torch.is_grad_enabled():
        return rms_norm_ref(x, _head_weights(wq, wk, heads, x.shape[1]), eps)[0]
    return _QKNorm.apply(x, wq, wk, heads, eps, one_sequence(x, blocks))


def _head_weights(wq: torch.Tensor, wk: torch.Tensor, heads: int, total: int) -> torch.Tensor:
    """The weight of each head, [total, D]."""
    return torch.cat([wq.detach().expand(heads, -1), wk.detach().expand(total - heads, -1)])


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
