"""rms_norm of each query head and each key head, with a weight for the queries and one for the keys (Qwen3).

    y = x r w,    r = 1 / sqrt(mean(x^2) + eps),    w = wq for the first `heads` heads, wk for the others

With plus_one, a weight w stands for 1 + w, as in rms_norm.py.

    with xh = x r:   dx = r (dy w - xh mean(dy w xh)),   dwq, dwk = sum over tokens and heads of dy xh

Formulas, roundings and the order along a row are those of rms_norm.py. The Triton kernels are in
qk_norm_triton.py.

Shapes: x, y [T, H, D]; wq, wk [D]; r [T, H] in fp32.
Roundings: y once, with the weight multiplied in fp32. dx once.
Order: the heads of a token are summed in a tree, those of each leaf first where there are leaves (leaves.py),
then the tokens block after block.
"""

import torch

from .backend import on_triton
from .leaves import WHOLE, Leaves
from .order import tree_sum
from .passes import ONE_SEQUENCE, Pass
from .rms_norm import add_rows, check_norm, norm_factors, rms_norm_bwd_ref, rms_norm_ref
from .rms_norm_cpp import norm_bwd, norm_fwd, norm_on_cpp, sum_heads


def _head_weights(wq: torch.Tensor, wk: torch.Tensor, heads: int, total: int) -> torch.Tensor:
    """The weight of each head, [total, D]."""
    return torch.cat([wq.expand(heads, -1), wk.expand(total - heads, -1)])


def _forward(x, wq, wk, heads, eps):
    """y and r, computed where x lies. wq and wk: factors, in x's dtype or in fp32."""
    if norm_on_cpp(x) and wq.dtype == x.dtype:
        return norm_fwd(x, (wq, wk), heads, eps)[:2]
    if not on_triton(x):
        return rms_norm_ref(x, _head_weights(wq, wk, heads, x.shape[1]), eps)
    from .qk_norm_triton import qk_norm_fwd

    return qk_norm_fwd(x, wq, wk, heads, eps)


def _backward(dy, x, r, wq, wk, heads, in_pass, leaves):
    """dx, and the contributions to dwq and dwk that rms_norm.add_rows takes."""
    if norm_on_cpp(x) and wq.dtype == x.dtype:
        dx, dw = norm_bwd(dy, x, r, (wq, wk), heads)
        return dx, _sums_of_heads(sum_heads, dw, heads, leaves)
    if not on_triton(x):
        dx, dw = rms_norm_bwd_ref(dy, x, r, _head_weights(wq, wk, heads, x.shape[1]))
        return dx.to(dy.dtype), _sums_of_heads(lambda dw, a, b: tree_sum(dw[:, a:b], 1), dw, heads, leaves)
    from .qk_norm_triton import qk_norm_bwd

    if leaves.count == 1:
        return qk_norm_bwd(dy, x, wq, wk, r, heads, in_pass.blocks)
    dx, sums = torch.empty_like(dy), []
    for places in _heads_of_leaves(heads, x.shape[1], leaves.mine, x.device):
        mine = qk_norm_bwd(
            *(t[:, places] for t in (dy, x)), wq, wk, r[:, places], heads // leaves.mine, in_pass.blocks
        )
        dx[:, places], part = mine
        sums.append(part)
    return dx, leaves.join(sums)


def _heads_of_leaves(heads: int, total: int, n: int, device: torch.device) -> list[torch.Tensor]:
    """The heads of each of n leaves: an equal part of the queries, and then of the keys."""
    parts = (torch.arange(a, b, device=device).chunk(n) for a, b in ((0, heads), (heads, total)))
    return [torch.cat(pair) for pair in zip(*parts, strict=True)]


def _sums_of_heads(sum_of, dw, heads, leaves):
    """Of the queries and of the keys of all ranks, [T, D] each. sum_of(dw, first, end): of these heads."""
    sums = []
    for first, end in ((0, heads), (heads, dw.shape[1])):
        n = (end - first) // leaves.mine
        sums.append(leaves.join([sum_of(dw, a, a + n) for a in range(first, end, n)]))
    return sums


class _QKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, wk, heads, eps, in_pass, plus_one, leaves):
        y, r = _forward(x, *norm_factors(plus_one, wq, wk), heads, eps)
        ctx.save_for_backward(x, r)
        ctx.weights, ctx.heads, ctx.in_pass, ctx.plus_one = (wq, wk), heads, in_pass, plus_one
        ctx.leaves = leaves
        return y

    @staticmethod
    def backward(ctx, dy):
        (x, r), in_pass, returned = ctx.saved_tensors, ctx.in_pass.over(dy), []
        factors = norm_factors(ctx.plus_one, *ctx.weights)
        dx, contributions = _backward(dy, x, r, *factors, ctx.heads, in_pass, ctx.leaves)
        for w, dw, wanted in zip(ctx.weights, contributions, ctx.needs_input_grad[1:3], strict=True):
            buffer = in_pass.buffer(w) if wanted else None
            if wanted:
                add_rows(buffer, dw, in_pass)
            returned.append(in_pass.returned_grad(w, buffer) if wanted else None)
        return dx, *returned, None, None, None, None, None


def qk_norm(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    heads: int,
    eps: float,
    in_pass: Pass = ONE_SEQUENCE,
    plus_one: bool = False,
    leaves: Leaves = WHOLE,
) -> torch.Tensor:
    """rms_norm of each head of x [T, H, D] -> [T, H, D].

    The weight of the first `heads` heads (queries) is wq [D]. The weight of the other heads (keys) is wk [D].
    plus_one: the factors are 1 + w. leaves: of the sums over heads; x has this rank's heads.
    dwq and dwk are summed in the order of the pass's token blocks. Raises ValueError on a bad shape, dtype or
    eps.
    """
    check_norm("qk_norm", x, wq, eps)
    check_norm("qk_norm", x, wk, eps)
    if x.dim() != 3 or not 0 < heads < x.shape[1]:
        raise ValueError(
            f"qk_norm: x {tuple(x.shape)} must be [T, H, D] with more than heads ({heads}) heads"
        )
    if not torch.is_grad_enabled():
        return _forward(x, *norm_factors(plus_one, wq, wk), heads, eps)[0]
    return _QKNorm.apply(x, wq, wk, heads, eps, in_pass, plus_one, leaves)
