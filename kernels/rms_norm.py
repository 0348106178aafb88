"""Root-mean-square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467).

    rms_norm:      y = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    add_rms_norm:  s = x + residual,    y = rms_norm(s, w)

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dw = sum_t dy xh;   the gradient of s is added to dx

rms_norm normalises rows [T, D], or each head of [T, H, D]. qk_norm normalises each head with one weight for
the query heads and one weight for the key heads (Qwen3). add_rms_norm normalises after a residual addition.
The Triton kernels are in rms_norm_triton.py.

Shapes: x, residual, s, y [T, D]; w [D]; r [T, 1] in fp32.
Roundings: s is rounded once, before the norm reads it (as vLLM's fused_add_rms_norm does). y is rounded once;
the weight is multiplied in fp32 (as vLLM's batch-invariant Triton kernel does). dx is rounded once; the
gradient of s is added in fp32.
Order: the mean is one sum along the row. D is static, and so is the order of the sum.
"""

import torch

from .backend import on_triton
from .columns import add_columns_ref
from .grad import accumulate_dtype, by_shard, check_dtype, grad_buffer, returned_grad
from .order import PassBlocks, one_sequence, sum_row, tree_sum


def rms_norm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only. x [T, D] with w [D], or x [T, H, D] with w [D] or [H, D].

    Returns y like x, and r [..., 1] in fp32.
    """
    xf = x.to(accumulate_dtype(x.dtype))
    # rsqrt differs between vector widths, and neither sqrt nor a reciprocal does.
    r = _sum_last(xf * xf).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()
    return (xf * r).mul_(w.to(xf.dtype)).to(x.dtype), r


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """sum_row for any leading shape. The last axis stays, with size 1."""
    return sum_row(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def _rms_norm_bwd(dy, x, r, w) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, and the contribution of each row to dw. Both have the shape of x, in fp32."""
    dyf, xh = dy.to(r.dtype), x.to(r.dtype) * r
    dw = dyf * xh
    dyw = dyf * w.to(r.dtype)
    mean = _sum_last(dyw * xh).div_(x.shape[-1])
    return dyw.sub_(xh.mul_(mean)).mul_(r), dw


def _add_weight_grad(w: torch.Tensor, dw: torch.Tensor, blocks: PassBlocks) -> torch.Tensor | None:
    """Add dw [T, D] or [T, H, D], summed over heads and tokens, to the gradient of w [D]."""
    acc, rows = grad_buffer(w), dw if dw.dim() == 2 else tree_sum(dw, 1)
    for shard_acc, shard_blocks in by_shard(acc, blocks):
        add_columns_ref(shard_acc, rows, shard_blocks)
    return returned_grad(w, acc)


def _forward(x, w, eps, residual=None):
    """y, r and s, computed where x lies. Without a residual s is x itself.

    x [T, D] or [T, H, D], w [D] or [H, D].
    """
    if not on_triton(x):
        s = x if residual is None else x + residual
        return *rms_norm_ref(s, w, eps), s
    from .rms_norm_triton import rms_norm_fwd

    heads = x if x.dim() == 3 else x.unsqueeze(1)
    y, r, s = rms_norm_fwd(heads, w.detach(), eps, None if residual is None else residual.unsqueeze(1))
    return y.view(x.shape), r, x if residual is None else s.view(x.shape)


def _backward(dy, x, r, w, weights, blocks, ds=None):
    """dx, and the gradient of each of `weights`.

    `weights` are triples (weight, first head, number of heads). They count the heads of x [T, H, D]; x [T, D]
    has one head.
    """
    if not on_triton(x):
        dx, dw = _rms_norm_bwd(dy, x, r, w)
        dx = (dx if ds is None else dx.add_(ds.to(dx.dtype))).to(dy.dtype)
        dw = dw if dw.dim() == 3 else dw.unsqueeze(1)
        return dx, *(
            _add_weight_grad(weight, dw[:, first : first + heads], blocks) for weight, first, heads in weights
        )
    from .rms_norm_triton import add_weight_grad, rms_norm_bwd

    dy, x = (tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (dy, x))
    dx = rms_norm_bwd(dy, x, w.detach(), r, None if ds is None else ds.unsqueeze(1))
    grads = []
    for weight, first, heads in weights:
        acc = grad_buffer(weight)
        for shard_acc, shard_blocks in by_shard(acc, blocks):
            add_weight_grad(shard_acc, dy, x, r, shard_blocks, first, heads)
        grads.append(returned_grad(weight, acc))
    return dx, *grads


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps, blocks):
        y, r, _ = _forward(x, w, eps)
        ctx.save_for_backward(x, r)
        ctx.w, ctx.blocks = w, blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        dx, dw = _backward(dy, x, r, ctx.w, [(ctx.w, 0, x.shape[1] if x.dim() == 3 else 1)], ctx.blocks)
        return dx.view(x.shape), dw, None, None


class _QKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, wk, heads, eps, blocks):
        w = _head_weights(wq, wk, heads, x.shape[1])
        y, r, _ = _forward(x, w, eps)
        ctx.save_for_backward(x, r, w)
        ctx.weights, ctx.blocks = [(wq, 0, heads), (wk, heads, x.shape[1] - heads)], blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r, w = ctx.saved_tensors
        return *_backward(dy, x, r, w, ctx.weights, ctx.blocks), None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, blocks):
        y, r, s = _forward(x, w, eps, residual)
        ctx.save_for_backward(s, r)
        ctx.w, ctx.blocks = w, blocks
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        s, r = ctx.saved_tensors
        dx, dw = _backward(dy, s, r, ctx.w, [(ctx.w, 0, 1)], ctx.blocks, ds)
        dx = dx.view(s.shape)
        return dx, dx, dw, None, None


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, blocks: PassBlocks | None = None) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis. x [T, D] or [T, H, D], w [D] -> the shape of x.

    `blocks` are token blocks (order.token_blocks): dw is summed in their order. Raises ValueError on a bad
    shape, dtype or eps.
    """
    _check("rms_norm", x, w, eps)
    if not torch.is_grad_enabled():
        return _forward(x, w, eps)[0]
    return _RMSNorm.apply(x, w, eps, one_sequence(x, blocks))


def qk_norm(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    heads: int,
    eps: float,
    blocks: PassBlocks | None = None,
) -> torch.Tensor:
    """rms_norm of each head of x [T, H, D] -> [T, H, D].

    The weight of the first `heads` heads (queries) is wq [D]. The weight of the other heads (keys) is wk [D].
    Raises ValueError on a bad shape, dtype or eps.
    """
    _check("qk_norm", x, wq, eps)
    _check("qk_norm", x, wk, eps)
    if x.dim() != 3 or not 0 < heads < x.shape[1]:
        raise ValueError(
            f"qk_norm: x {tuple(x.shape)} must be [T, H, D] with more than heads ({heads}) heads"
        )
    if not torch.is_grad_enabled():
        return _forward(x, _head_weights(wq, wk, heads, x.shape[1]), eps)[0]
    return _QKNorm.apply(x, wq, wk, heads, eps, one_sequence(x, blocks))


def _head_weights(wq: torch.Tensor, wk: torch.Tensor, heads: int, total: int) -> torch.Tensor:
    """The weight of each head, [total, D]."""
    return torch.cat([wq.detach().expand(heads, -1), wk.detach().expand(total - heads, -1)])


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float, blocks: PassBlocks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s, w), s) with s = x + residual. x, residual [T, D], w [D] -> [T, D], [T, D].

    Raises ValueError on a bad shape, dtype or eps.
    """
    _check("add_rms_norm", x, w, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype or x.dim() != 2:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} {residual.dtype} must be like "
            f"x {tuple(x.shape)} {x.dtype}, [T, D]"
        )
    if not torch.is_grad_enabled():
        y, _, s = _forward(x, w, eps, residual)
        return y, s
    return _AddRMSNorm.apply(x, residual, w, eps, one_sequence(x, blocks))


def _check(op: str, x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    check_dtype(op, x=x, w=w)
    if x.dim() not in (2, 3):
        raise ValueError(f"{op}: x {tuple(x.shape)} must be [T, D] or [T, H, D]")
    if w.shape != x.shape[-1:]:
        raise ValueError(f"{op}: x.shape[-1] ({x.shape[-1]}) must equal w.shape[0] ({w.shape[0]})")
    if not eps > 0:
        raise ValueError(f"{op}: eps ({eps}) must be positive")
