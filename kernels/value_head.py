"""The critic's value of each row: a linear head of one output (Schulman et al., arXiv:1707.06347).

    v_t = sum_d h_td w_d

    dw_d = sum_t dv_t h_td,   dh_td = dv_t w_d + dh'_td

h goes on to other operations, and dh' is the gradient that comes back from them. value_head therefore returns
h too. So the two gradients of h are added in one place and rounded once, as in add_rms_norm. The Triton
kernels are in value_head_triton.py.

Shapes: h, dh, dh' [T, D]; w [D]; v, dv [T] in fp32.
Roundings: v is not rounded: it is an fp32 sum of fp32 products. dh is rounded once to the dtype of h.
Order: v is one sum along the row. D is static, and so is the order of the sum. dw is summed as the gradient
of a norm's weight is (rms_norm.add_rows).
"""

from dataclasses import replace

import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .order import sum_row
from .passes import ONE_SEQUENCE, Pass
from .rms_norm import add_rows
from .shared_rows import ALL_ROWS


def value_head_ref(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Forward only: v [T] in fp32 (fp64 for fp64). h [T, D], w [D]."""
    dtype = accumulate_dtype(h.dtype)
    return sum_row(h.to(dtype) * w.to(dtype))


def value_head_bwd_ref(
    dv: torch.Tensor, dh_after: torch.Tensor, h: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh like h, and the contribution of each row to dw, [T, D] in fp32. dv [T]; dh_after: dh', like h."""
    dv = dv.unsqueeze(1)
    dh = (dv * w.to(dv.dtype)).add_(dh_after.to(dv.dtype)).to(h.dtype)
    return dh, dv * h.to(dv.dtype)


def _forward(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if not on_triton(h):
        return value_head_ref(h, w)
    from .value_head_triton import value_head_fwd

    return value_head_fwd(h, w.detach())


class _ValueHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, in_pass):
        ctx.save_for_backward(h)
        ctx.w, ctx.in_pass = w, in_pass
        return _forward(h, w), h.view_as(h)

    @staticmethod
    def backward(ctx, dv, dh_after):
        (h,) = ctx.saved_tensors
        w, in_pass = ctx.w, ctx.in_pass.over(dv)
        if on_triton(h):
            from .value_head_triton import value_head_bwd

            dh, dw = value_head_bwd(dv, dh_after, h, w.detach(), in_pass.blocks)
        else:
            dh, dw = value_head_bwd_ref(dv, dh_after, h, w)
        if not ctx.needs_input_grad[1]:
            return dh, None, None
        buffer, shared = in_pass.buffer(w), in_pass.shared
        if shared.size > 1:
            dw = dw.chunk(shared.size, 1)[shared.ranks.rank].contiguous()
        add_rows(buffer, dw, replace(in_pass, shared=ALL_ROWS))
        return dh, in_pass.returned_grad(w, buffer), None


def value_head(
    h: torch.Tensor, w: torch.Tensor, in_pass: Pass = ONE_SEQUENCE
) -> tuple[torch.Tensor, torch.Tensor]:
    """v and h. h [T, D], w [D] -> [T] in fp32, and h [T, D] for the operations that read it after this one.

    dw is summed in the order of the pass's token blocks. Where ranks share the pass's rows, each has all of h
    here, and sums a part of dw. Raises ValueError on a bad shape or dtype.
    """
    check_dtype("value_head", h=h, w=w)
    if h.dim() != 2 or w.shape != h.shape[1:]:
        raise ValueError(f"value_head: h {tuple(h.shape)} and w {tuple(w.shape)} must be [T, D] and [D]")
    if not torch.is_grad_enabled():
        return _forward(h, w), h
    return _ValueHead.apply(h, w, in_pass)
