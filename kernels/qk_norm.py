"""rms_norm of each query head and each key head, with a weight for the queries and one for the keys (Qwen3).

    y = x r w,    r = 1 / sqrt(mean(x^2) + eps),    w = wq for the first `heads` heads, wk for the others

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dwq, dwk = sum over tokens and heads of dy xh

Formulas, roundings and the order along a row are those of rms_norm.py. The Triton kernels are in
qk_norm_triton.py.

Shapes: x, y [T, H, D]; wq, wk [D]; r [T, H] in fp32.
Roundings: y once, with the weight multiplied in fp32. dx once.
Order: the heads of a token are summed in a tree, then the tokens block after block.
"""

import torch

from .backend import on_triton
from .columns import add_columns_ref
from .grad import by_shard, grad_buffer, returned_grad
from .order import PassBlocks, one_sequence, tree_sum
from .rms_norm import check_norm, rms_norm_bwd_ref, rms_norm_ref


def _head_weights(wq: torch.Tensor, wk: torch.Tensor, heads: int, total: int) -> torch.Tensor:
    """The weight of each head, [total, D]."""
    return torch.cat([wq.detach().expand(heads, -1), wk.detach().expand(total - heads, -1)])


def _forward(x, wq, wk, heads, eps):
    """y and r, computed where x lies."""
    if not on_triton(x):
        return rms_norm_ref(x, _head_weights(wq, wk, heads, x.shape[1]), eps)
    from .qk_norm_triton import qk_norm_fwd

    return qk_norm_fwd(x, wq.detach(), wk.detach(), heads, eps)


def _backward(dy, x, r, wq, wk, heads, blocks):
    """dx, and the gradients of wq and wk where no buffer takes them."""
    buffers = [grad_buffer(w) for w in (wq, wk)]
    if not on_triton(x):
        dx, dw = rms_norm_bwd_ref(dy, x, r, _head_weights(wq, wk, heads, x.shape[1]))
        dx = dx.to(dy.dtype)
        for acc, rows in zip(buffers, (dw[:, :heads], dw[:, heads:]), strict=True):
            for shard_acc, shard_blocks in by_shard(acc, blocks):
                add_columns_ref(shard_acc, tree_sum(rows, 1), shard_blocks)
    else:
        from .columns_triton import NORM_ROWS, add_partials
        from .qk_norm_triton import qk_norm_bwd

        dx, partials = qk_norm_bwd(dy, x, wq.detach(), wk.detach(), r, heads, blocks)
        for acc, partial in zip(buffers, partials, strict=True):
            add_partials(acc, partial, blocks, NORM_ROWS)
    return dx, *(returned_grad(w, acc) for w, acc in zip((wq, wk), buffers, strict=True))


class _QKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, wk, heads, eps, blocks):
        y, r = _forward(x, wq, wk, heads, eps)
        ctx.save_for_backward(x, r)
        ctx.weights, ctx.heads, ctx.blocks = (wq, wk), heads, blocks
        return y

    @staticmethod
    def backward(ctx, dy):
        x, r = ctx.saved_tensors
        return *_backward(dy, x, r, *ctx.weights, ctx.heads, ctx.blocks), None, None, None


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
    `blocks` are token blocks (order.token_blocks): dwq and dwk are summed in their order. Raises ValueError
    on a bad shape, dtype or eps.
    """
    check_norm("qk_norm", x, wq, eps)
    check_norm("qk_norm", x, wk, eps)
    if x.dim() != 3 or not 0 < heads < x.shape[1]:
        raise ValueError(
            f"qk_norm: x {tuple(x.shape)} must be [T, H, D] with more than heads ({heads}) heads"
        )
    if not torch.is_grad_enabled():
        return _forward(x, wq, wk, heads, eps)[0]
    return _QKNorm.apply(x, wq, wk, heads, eps, one_sequence(x, blocks))
