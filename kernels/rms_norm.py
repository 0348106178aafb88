"""Root-mean-square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467).

    rms_norm:      y = x r w,    r = 1 / sqrt(mean(x^2) + eps)
    add_rms_norm:  s = x + residual,    y = rms_norm(s, w)

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dw = sum_t dy xh;   the gradient of s is added to dx

With plus_one, w stands for 1 + w, which is computed in fp32 (Gemma); the gradient of w is that of 1 + w.
add_rms_norm normalises after a residual addition. qk_norm.py normalises heads. The Triton kernels are in
rms_norm_triton.py.

Shapes: x, residual, s, y [T, D]; w [D]; r [T] in fp32.
Roundings: s is rounded once, before the norm reads it (as vLLM's fused_add_rms_norm does). y is rounded once;
the weight is multiplied in fp32 (as vLLM's batch-invariant Triton kernel does). dx is rounded once; the
gradient of s is added in fp32.
Order: the mean is one sum along the row. D is static, and so is the order of the sum.
"""

import torch

from .backend import on_triton
from .columns import add_columns_cpu
from .grad import GradBuffer, accumulate_dtype, check_dtype
from .order import sum_last
from .passes import ONE_SEQUENCE, Pass
from .rms_norm_cpp import norm_bwd, norm_fwd, norm_on_cpp


def rms_norm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only: y like x, and r [T] or [T, H]. x [T, D] with w [D], or x [T, H, D] with w [H, D]."""
    xf = x.to(accumulate_dtype(x.dtype))
    # rsqrt differs between vector widths, and neither sqrt nor a reciprocal does.
    r = sum_last(xf * xf).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()
    return (xf * r).mul_(w.to(xf.dtype)).to(x.dtype), r.squeeze(-1)


def rms_norm_bwd_ref(
    dy: torch.Tensor, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, and the contribution of each row to dw, both like x but in fp32. Shapes as in rms_norm_ref."""
    r = r.unsqueeze(-1)
    dyf, xh = dy.to(r.dtype), x.to(r.dtype) * r
    dw = dyf * xh
    dyw = dyf * w.to(r.dtype)
    mean = sum_last(dyw * xh).div_(x.shape[-1])
    return dyw.sub_(xh.mul_(mean)).mul_(r), dw


def norm_factors(plus_one: bool, *weights: torch.Tensor) -> list[torch.Tensor]:
    """What rows are multiplied by, for each weight [D]."""
    return [w.detach().to(accumulate_dtype(w.dtype)).add(1.0) if plus_one else w.detach() for w in weights]


def _forward(x, w, eps, residual=None):
    """y, r and s, computed where x lies. Without a residual s is x itself. w: in x's dtype, or in fp32."""
    if norm_on_cpp(x) and w.dtype == x.dtype:
        return norm_fwd(x, (w, w), 1, eps, residual)
    if not on_triton(x):
        s = x if residual is None else x + residual
        return *rms_norm_ref(s, w, eps), s
    from .rms_norm_triton import rms_norm_fwd

    y, r, s = rms_norm_fwd(x, w, eps, residual)
    return y, r, x if residual is None else s


def _backward(dy, x, r, w, plus_one, in_pass, wants_dw, ds=None):
    """dx, and the gradient of w where it is wanted and no buffer takes it.

    A kernel computes both together, and autograd drops a dx that it does not need.
    """
    in_pass, (factors,) = in_pass.over(dy), norm_factors(plus_one, w)
    if norm_on_cpp(x) and factors.dtype == x.dtype:
        dx, dw = norm_bwd(dy, x, r, (factors, factors), 1, ds)
    elif not on_triton(x):
        dx, dw = rms_norm_bwd_ref(dy, x, r, factors)
        dx = (dx if ds is None else dx.add_(ds.to(dx.dtype))).to(dy.dtype)
    else:
        from .rms_norm_triton import rms_norm_bwd

        dx, dw = rms_norm_bwd(dy, x, factors, r, in_pass.blocks, ds)
    if not wants_dw:
        return dx, None
    buffer = in_pass.buffer(w)
    add_rows(buffer, dw, in_pass)
    return dx, in_pass.returned_grad(w, buffer)


def add_rows(buffer: GradBuffer, dw: torch.Tensor, in_pass: Pass) -> None:
    """buffer [shards, D] += the contributions to a norm's dw, in the order of the pass's blocks.

    dw: of each row [T, D] from the reference, of each run of rows from Triton (order.BlockTables).
    """
    blocks = in_pass.blocks
    if not on_triton(dw):
        dw = in_pass.shared.columns(dw)
        add_columns_cpu(buffer.zeroed(blocks.shards), dw, blocks)
    else:
        from .columns_triton import NORM_ROWS

        buffer.add_partials(dw, blocks, NORM_ROWS)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps, in_pass, plus_one):
        y, r, _ = _forward(x, *norm_factors(plus_one, w), eps)
        ctx.save_for_backward(x, r)
        ctx.w, ctx.in_pass, ctx.plus_one = w, in_pass, plus_one
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        wants_dw = ctx.needs_input_grad[1]
        return *_backward(dy, x, r, ctx.w, ctx.plus_one, ctx.in_pass, wants_dw), None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, w, eps, in_pass, plus_one):
        y, r, s = _forward(x, *norm_factors(plus_one, w), eps, residual)
        ctx.save_for_backward(s, r)
        ctx.w, ctx.in_pass, ctx.plus_one = w, in_pass, plus_one
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        s, r = ctx.saved_tensors
        wants_dw = ctx.needs_input_grad[2]
        dx, dw = _backward(dy, s, r, ctx.w, ctx.plus_one, ctx.in_pass, wants_dw, ds)
        return dx, dx, dw, None, None, None


def rms_norm(
    x: torch.Tensor, w: torch.Tensor, eps: float, in_pass: Pass = ONE_SEQUENCE, plus_one: bool = False
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis. x [T, D], w [D] -> [T, D].

    plus_one: the factor is 1 + w. dw is summed in the order of the pass's token blocks. Raises ValueError on
    a bad shape, dtype or eps.
    """
    _check("rms_norm", x, w, eps)
    if not torch.is_grad_enabled():
        return _forward(x, *norm_factors(plus_one, w), eps)[0]
    return _RMSNorm.apply(x, w, eps, in_pass, plus_one)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    in_pass: Pass = ONE_SEQUENCE,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s, w), s) with s = x + residual. x, residual [T, D], w [D] -> [T, D], [T, D].

    Raises ValueError on a bad shape, dtype or eps.
    """
    _check("add_rms_norm", x, w, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: residual {tuple(residual.shape)} {residual.dtype} must be like "
            f"x {tuple(x.shape)} {x.dtype}"
        )
    if not torch.is_grad_enabled():
        y, _, s = _forward(x, *norm_factors(plus_one, w), eps, residual)
        return y, s
    return _AddRMSNorm.apply(x, residual, w, eps, in_pass, plus_one)


def _check(op: str, x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    if x.dim() != 2:
        raise ValueError(f"{op}: x {tuple(x.shape)} must be [T, D]")
    check_norm(op, x, w, eps)


def check_norm(op: str, x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    """Raise ValueError unless w [D] fits x [..., D], and eps is positive."""
    check_dtype(op, x=x, w=w)
    if w.shape != x.shape[-1:]:
        raise ValueError(f"{op}: x.shape[-1] ({x.shape[-1]}) must equal w.shape[0] ({w.shape[0]})")
    if not eps > 0:
        raise ValueError(f"{op}: eps ({eps}) must be positive")
