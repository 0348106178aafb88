"""Triton kernel of adamw.py: each element is read once and written once.

The launch switches the fusion of multiply and add off, so every operation rounds as the reference's does.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch

# Elements of one program, and its warps. They decide no bit: no element depends on another.
TILE, WARPS = 1024, 4


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["master_ptr", "first_ptr", "second_ptr", "grad_ptr", "out_ptr"],
)
def _adamw(
    # pointers
    master_ptr,
    first_ptr,
    second_ptr,
    grad_ptr,
    out_ptr,
    # numbers of the update (adamw.AdamW)
    n,
    grad_scale,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    correction1,
    correction2,
    eps,
    # constants
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    g = tl.load(grad_ptr + i, mask=mask, other=0.0) * grad_scale
    m = tl.load(first_ptr + i, mask=mask, other=0.0) * beta1 + g * rest1
    v = tl.load(second_ptr + i, mask=mask, other=0.0) * beta2 + g * g * rest2
    step = tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps) * lr
    w = tl.load(master_ptr + i, mask=mask, other=0.0) - step
    tl.store(first_ptr + i, m, mask=mask)
    tl.store(second_ptr + i, v, mask=mask)
    tl.store(master_ptr + i, w, mask=mask)
    if out_ptr is not None:
        tl.store(out_ptr + i, w.to(out_ptr.dtype.element_ty), mask=mask)


def adamw(
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    grad: torch.Tensor,
    numbers: tuple[float, ...],
    out: torch.Tensor | None,
) -> None:
    """The update of adamw.adamw. numbers: an adamw.AdamW."""
    n, (grad_scale, lr, beta1, beta2, correction1, correction2, eps) = master.numel(), numbers
    if not n:
        return
    launch(
        _adamw,
        (ceil_div(n, TILE),),
        master,
        first,
        second,
        grad,
        out,
        n,
        grad_scale,
        lr,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        correction1,
        correction2,
        eps,
        TILE=TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
