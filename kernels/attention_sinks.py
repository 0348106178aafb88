"""Attention sinks: a learned logit of each query head, which every row of the head has beside its scores.

attention.py has the equations, and the order. Here is what belongs to the weight: its rows, and its gradient.

    z_t = w     dw = sum_t dz_t     dz_th = -exp(z_h - lse_th) delta_th,    delta_th = do_th . o_th

Shapes: w [Hq]; z, dz, lse [T, Hq]; o, do [T, Hq, D].
Roundings: z is in fp32 (fp64 for fp64), which holds w exactly. dz is not rounded. dw is not rounded where the
pass has fp32 buffers (grad.py).
Order: dw as in columns.py, over the token blocks of the pass. A row of dz depends on its own row only.
"""

import torch

from .backend import on_triton
from .columns import add_columns
from .grad import accumulate_dtype
from .passes import ONE_SEQUENCE, Pass


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError for sinks that are not [T, Hq] of q [T, Hq, D], in the dtype of its sums."""
    dtype = accumulate_dtype(q.dtype)
    if sinks is not None and (sinks.shape != q.shape[:2] or sinks.dtype != dtype):
        raise ValueError(
            f"attention: sinks {tuple(sinks.shape)} in {sinks.dtype} must be {tuple(q.shape[:2])}, one of "
            f"each row and head, in {dtype}"
        )


def sinks_bwd(do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks, [T, Hq] in the dtype of lse."""
    if on_triton(do):
        from .attention_sinks_triton import sinks_bwd as bwd_on_gpu

        return bwd_on_gpu(do, o, lse, sinks)
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).contiguous().sum(-1)
    return (sinks - lse).exp_().mul_(delta).neg_()


class _SinkRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, T, in_pass):
        # w does not go through save_for_backward: its identity finds its buffer.
        ctx.w, ctx.in_pass = w, in_pass
        return _rows(w, T)

    @staticmethod
    def backward(ctx, dz):
        in_pass = ctx.in_pass.over(dz)
        buffer = in_pass.buffer(ctx.w)
        add_columns(buffer, dz, in_pass.blocks)
        return in_pass.returned_grad(ctx.w, buffer), None, None


def sink_rows(w: torch.Tensor, T: int, in_pass: Pass = ONE_SEQUENCE) -> torch.Tensor:
    """The sinks of T rows, [T, Hq] in fp32 (fp64 for fp64), of w [Hq]. in_pass: its blocks are of the rows.

    Raises ValueError unless w is a vector.
    """
    if w.dim() != 1:
        raise ValueError(f"sink_rows: w {tuple(w.shape)} must be [heads]")
    return _SinkRows.apply(w, T, in_pass) if torch.is_grad_enabled() else _rows(w, T)


def _rows(w: torch.Tensor, T: int) -> torch.Tensor:
    return w.to(accumulate_dtype(w.dtype)).expand(T, -1)
