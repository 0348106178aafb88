"""Linear projection.

    y = x w^T + b          dx = dy w          dw = dy^T x          db = sum_t dy

Shapes: x [T, K]; w [N, K]; b [N]; y [T, N].
Roundings: y is rounded once. The bias is added to the fp32 sum before the rounding, as in vLLM's kernel. So
on a CPU a 16-bit product with a bias is computed from fp32 numbers. dx is rounded once. dw and db are not
rounded where the pass has fp32 buffers (grad.py).
Where the pass has LoRA adapters of w, their gradients take the place of dw (low_rank.py). Where these are not
merged into w (Adapted), y and dx are the fp32 sums above, the bias included, plus what the adapters add, and
are rounded once after it. So an adapter that moves no weight of w by half of its last bit is not lost.
Order: as in matmul.py and columns.py, and by leaves where tensor parallelism may cut a sum (leaves.py). A row
of y or dx depends on its own row of x or dy only.
"""

from typing import NamedTuple

import torch

from .backend import on_triton
from .columns import add_columns
from .grad import accumulate_dtype, check_dtype
from .leaves import UNCUT, Cut
from .low_rank import LowRank, LowRankBuffers, add_low_rank, add_to_input_gradient, add_to_product
from .matmul import add_outer, matmul, matmul_cpu, matmul_unrounded
from .passes import ONE_SEQUENCE, Pass
from .tile_tables import DEFAULT_TABLE, TileTable


class Adapted(NamedTuple):
    """A weight [N, K], and LoRA's adapters of it that are not merged into it."""

    w: torch.Tensor
    adapters: tuple[LowRank, ...]

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.w.shape


def linear_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None = None,
    pack: torch.Tensor | None = None,
    cut: Cut = UNCUT,
    tiles: TileTable = DEFAULT_TABLE,
) -> torch.Tensor:
    """Forward only. x [T, K], w [N, K], b [N] -> [T, N]. pack, tiles: see matmul."""
    dtype = accumulate_dtype(x.dtype)
    if cut.joins_output:
        y = cut.product(x, w, pack, tiles)
    elif b is None:
        return matmul_cpu(x, w, pack)
    else:
        y = matmul_cpu(x.to(dtype), w.to(dtype), pack if w.dtype == dtype else None)
    return (y if b is None else y + b.to(dtype)).to(x.dtype)


def _forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, in_pass: Pass, tiles: TileTable, cut: Cut
) -> torch.Tensor:
    if cut.joins_output or not on_triton(x):
        return linear_ref(x, w, b, in_pass.packed.get(w), cut, tiles)
    from .matmul_triton import matmul as matmul_with_bias

    return matmul_with_bias(x, w, b, tiles, whole=cut.whole(w))


def input_gradient(dy: torch.Tensor, w: torch.Tensor, tiles: TileTable, cut: Cut = UNCUT) -> torch.Tensor:
    """dx = dy w, rounded once. dy [T, N], w [N, K] -> [T, K]. tiles: see matmul."""
    if cut.joins_dx:
        return cut.product(dy, w.t(), tiles=tiles).to(dy.dtype)
    return matmul(dy, w.t(), tiles=tiles, whole=cut.whole(w)[::-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, in_pass, tiles, cut):
        # w and b do not go through save_for_backward: their identity finds their buffers.
        ctx.save_for_backward(x)
        ctx.w, ctx.b, ctx.in_pass, ctx.tiles, ctx.cut = w, b, in_pass, tiles, cut
        return _forward(x, w, b, in_pass, tiles, cut)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w, b, in_pass, dw, db = ctx.w, ctx.b, ctx.in_pass.over(dy), None, None
        dx = input_gradient(dy, w, ctx.tiles, ctx.cut) if ctx.needs_input_grad[0] else None
        shared = in_pass.shared
        if ctx.needs_input_grad[1]:
            buffer = in_pass.buffer(w)
            if isinstance(buffer, LowRankBuffers):
                add_low_rank(buffer, dy, x, in_pass.blocks, ctx.cut, shared)
            else:
                add_outer(buffer, shared.columns(dy), shared.whole(x), in_pass.blocks)
            dw = in_pass.returned_grad(w, buffer)
        if ctx.needs_input_grad[2]:
            buffer = in_pass.buffer(b)
            add_columns(buffer, shared.columns(dy), in_pass.blocks)
            db = in_pass.returned_grad(b, buffer)
        return dx, dw, db, None, None, None


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, adapters, in_pass, tiles, cut):
        ctx.save_for_backward(x)
        ctx.w, ctx.adapters, ctx.in_pass, ctx.tiles, ctx.cut = w, adapters, in_pass, tiles, cut
        return _adapted_forward(x, w, b, adapters, tiles, cut)

    @staticmethod
    def backward(ctx, dy):
        (x,), dx, in_pass = ctx.saved_tensors, None, ctx.in_pass.over(dy)
        if ctx.needs_input_grad[0]:
            dx = (
                ctx.cut.product(dy, ctx.w.t())
                if ctx.cut.joins_dx
                else matmul_unrounded(dy, ctx.w.t(), ctx.tiles)
            )
            add_to_input_gradient(dx, dy.to(dx.dtype), ctx.adapters, ctx.cut)
            dx = dx.to(dy.dtype)
        buffers = in_pass.buffer(ctx.w)
        if isinstance(buffers, LowRankBuffers):
            add_low_rank(buffers, dy, x, in_pass.blocks, ctx.cut, in_pass.shared)
        return dx, None, None, None, None, None, None


def _adapted_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    adapters: tuple[LowRank, ...],
    tiles: TileTable,
    cut: Cut,
) -> torch.Tensor:
    y = cut.product(x, w) if cut.joins_output else matmul_unrounded(x, w, tiles)
    if b is not None:
        y += b.to(y.dtype)
    add_to_product(y, x.to(y.dtype), adapters, cut)
    return y.to(x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Adapted,
    b: torch.Tensor | None = None,
    in_pass: Pass = ONE_SEQUENCE,
    tiles: TileTable = DEFAULT_TABLE,
    cut: Cut = UNCUT,
) -> torch.Tensor:
    """y = x w^T + b. x [T, K], weight w [N, K], b [N] -> [T, N].

    The weight gradient is summed in the order of the pass's token blocks. tiles: see matmul. cut: of the
    weight among ranks; leaves of an adapted weight are built for CPUs. Of one, the adapters' gradient is
    summed where the pass has buffers for it, and w has none. Raises ValueError on a shape or dtype that
    does not fit.
    """
    w, adapters = weight if isinstance(weight, Adapted) else (weight, None)
    check_dtype("linear", x=x, w=w, **({} if b is None else {"b": b}))
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} must be [T, K] and w {tuple(w.shape)} [N, K] with the same K"
        )
    if b is not None and b.shape != (w.shape[0],):
        raise ValueError(f"linear: b {tuple(b.shape)} must be [{w.shape[0]}], the rows of w")
    if adapters is not None:
        if torch.is_grad_enabled():
            return _AdaptedLinear.apply(x, w, b, adapters, in_pass, tiles, cut)
        return _adapted_forward(x, w, b, adapters, tiles, cut)
    if not torch.is_grad_enabled():
        return _forward(x, w, b, in_pass, tiles, cut)
    return _Linear.apply(x, w, b, in_pass, tiles, cut)
