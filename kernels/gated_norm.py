"""RMSNorm of each head, times a gate.

    y = o r w silu(z),   r = 1 / sqrt(mean(o^2) + eps),   silu(z) = z s,   s = 1 / (1 + exp(-z))
    with oh = o r, n = dy silu(z) w:   do = r (n - oh mean(n oh)),   dz = dy oh w s (1 + z (1 - s))
    dw = sum over tokens and heads of dy silu(z) oh

Source: Gated DeltaNet (arXiv:2412.06464), transformers' Qwen3_5RMSNormGated, which rounds three times.

Shapes: o, z, y [T, H, V]; w [V].
Roundings: y once; do and dz once each.
Order: along a row as in rms_norm.py; the heads of a token in a tree, then the tokens block after block.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .order import sum_last, tree_sum
from .passes import ONE_SEQUENCE, Pass
from .rms_norm import add_rows


def _normed(o: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """oh [T, H, V] and r [T, H, 1]."""
    r = sum_last(o * o).div_(o.shape[-1]).add_(eps).sqrt_().reciprocal_()
    return o * r, r


def gated_norm_ref(o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """Forward only."""
    acc = accumulate_dtype(o.dtype)
    zf = z.to(acc)
    silu = zf / torch.exp(-zf).add_(1.0)
    return (_normed(o.to(acc), eps)[0].mul_(w.to(acc)).mul_(silu)).to(o.dtype)


def gated_norm_bwd_ref(
    dy: torch.Tensor, o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """do and dz [T, H, V], and each token's contribution to dw, [T, V] in the accumulator's dtype."""
    acc = accumulate_dtype(o.dtype)
    dyf, zf, wf = dy.to(acc), z.to(acc), w.to(acc)
    oh, r = _normed(o.to(acc), eps)
    s = torch.exp(-zf).add_(1.0).reciprocal_()
    gated = dyf * (zf * s)
    n = gated * wf
    do = (n - oh * sum_last(n * oh).div_(o.shape[-1])) * r
    dz = dyf * oh * wf * (s * (1.0 + zf * (1.0 - s)))
    return do.to(o.dtype), dz.to(z.dtype), tree_sum(gated * oh, 1)


def _forward(o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """y, computed where o lies."""
    if not on_triton(o):
        return gated_norm_ref(o, z, w, eps)
    from .gated_norm_triton import gated_norm_fwd

    return gated_norm_fwd(o, z, w, eps)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, z, w, eps, in_pass):
        ctx.save_for_backward(o, z)
        ctx.w, ctx.eps, ctx.in_pass = w, eps, in_pass
        return _forward(o, z, w, eps)

    @staticmethod
    def backward(ctx, dy):
        w, in_pass = ctx.w, ctx.in_pass.over(dy)
        if on_triton(dy):
            from .gated_norm_triton import gated_norm_bwd

            do, dz, dw = gated_norm_bwd(dy, *ctx.saved_tensors, w, ctx.eps, in_pass.blocks)
        else:
            do, dz, dw = gated_norm_bwd_ref(dy, *ctx.saved_tensors, w, ctx.eps)
        if not ctx.needs_input_grad[2]:
            return do, dz, None, None, None
        buffer = in_pass.buffer(w)
        add_rows(buffer, dw, in_pass)
        return do, dz, in_pass.returned_grad(w, buffer), None, None


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, in_pass: Pass = ONE_SEQUENCE
) -> torch.Tensor:
    """norm(o) w silu(z). o, z [T, H, V], w [V] -> [T, H, V]. Raises ValueError on a bad shape or dtype."""
    check_dtype("gated_norm", o=o, z=z, w=w)
    if o.dim() != 3 or z.shape != o.shape or w.shape != o.shape[-1:]:
        raise ValueError(
            f"gated_norm: o {tuple(o.shape)} and z {tuple(z.shape)} must be [T, H, V], and w "
            f"{tuple(w.shape)} [V]"
        )
    if torch.is_grad_enabled():
        return _GatedNorm.apply(o, z, w, eps, in_pass)
    return _forward(o, z, w, eps)
