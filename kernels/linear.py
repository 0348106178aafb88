"""Linear projection.

    y = x w^T + b          dx = dy w          dw = dy^T x          db = sum_t dy

Shapes: x [T, K]; w [N, K]; b [N]; y [T, N].
Roundings: y is rounded once. The bias is added to the fp32 sum before the rounding, as in vLLM's kernel. So
on a CPU a 16-bit product with a bias is computed from fp32 numbers. dx is rounded once. dw and db are not
rounded where the weight has an fp32 `main_grad` (grad.py).
Order: as in matmul.py and columns.py. A row of y or dx depends on its own row of x or dy only.
"""

import torch

from .backend import on_triton
from .columns import add_columns
from .grad import accumulate_dtype, by_shard, by_shard_or_empty, check_dtype, grad_buffer, returned_grad
from .matmul import add_outer, matmul, matmul_ref
from .order import PassBlocks, one_sequence


def linear_ref(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """Forward only. x [T, K], w [N, K], b [N] -> [T, N]."""
    if b is None:
        return matmul_ref(x, w)
    dtype = accumulate_dtype(x.dtype)
    return (matmul_ref(x.to(dtype), w.to(dtype)) + b.to(dtype)).to(x.dtype)


def _forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    if not on_triton(x):
        return linear_ref(x, w, b)
    from .matmul_triton import matmul as matmul_with_bias

    return matmul_with_bias(x, w, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, blocks):
        # w and b are attributes of ctx and do not go through save_for_backward: the backward needs the tensor
        # object itself, for its main_grad.
        ctx.save_for_backward(x)
        ctx.w, ctx.b, ctx.blocks = w, b, blocks
        return _forward(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w, b, dw, db = ctx.w, ctx.b, None, None
        dx = matmul(dy, w.t()) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            acc = grad_buffer(w)
            for shard_acc, blocks, empty in by_shard_or_empty(acc, ctx.blocks):
                add_outer(shard_acc, dy, x, blocks, empty)
            dw = returned_grad(w, acc)
        if b is not None and ctx.needs_input_grad[2]:
            acc = grad_buffer(b)
            for shard_acc, blocks in by_shard(acc, ctx.blocks):
                add_columns(shard_acc, dy, blocks)
            db = returned_grad(b, acc)
        return dx, dw, db, None


def linear(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, blocks: PassBlocks | None = None
) -> torch.Tensor:
    """y = x w^T + b. x [T, K], w [N, K], b [N] -> [T, N].

    `blocks` are token blocks (order.token_blocks): the weight gradient is summed in their order. By default
    all rows are one sequence. Raises ValueError on a shape or dtype that does not fit.
    """
    check_dtype("linear", x=x, w=w, **({} if b is None else {"b": b}))
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} must be [T, K] and w {tuple(w.shape)} [N, K] with the same K"
        )
    if b is not None and b.shape != (w.shape[0],):
        raise ValueError(f"linear: b {tuple(b.shape)} must be [{w.shape[0]}], the rows of w")
    if not torch.is_grad_enabled():
        return _forward(x, w, b)
    return _Linear.apply(x, w, b, one_sequence(x, blocks))
