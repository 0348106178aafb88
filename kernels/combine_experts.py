"""The output of a mixture of experts: the weighted sum of what a token's experts compute.

    y_t = sum over the slots j of t of  q_tj (h_r w_e^T + b_e)     with the row r and the expert e of the slot

    dh_r = q_tj (dy_t w_e)      dq_tj = (dy_t w_e) . h_r + dy_t . b_e
    dw_e = sum over its rows of q_tj dy_t^T h_r     db_e = sum over its rows of q_tj dy_t

Shapes: h [R, K]; w [E N, K] holds the matrices [N, K] of the experts one after another, or w [E, K, N] each
one transposed, and with the latter b [E, N]; q [T, k] the routing weights in fp32 (fp64 for fp64); y [T, N].
T tokens, R rows (expert_rows.py), E experts.
Roundings, as in vLLM's fused_moe_kernel and moe_sum: the fp32 sum of a product and its bias is multiplied by
the routing weight and then rounded once to the dtype of h; the slots are added in fp32, slot after slot from
0, and the sum is rounded once. So on a CPU 16-bit products are computed from fp32 numbers. dh is rounded
once, from the fp32 sum times q. dq is not rounded. q dy is rounded to the dtype of h before it is summed, and
before its product with h. dw and db are not rounded where the pass has fp32 buffers (grad.py).
Where LoRA adapters of w are not merged into it (linear.Adapted), what the adapters of the row's expert add
(grouped_linear.py) is added to the fp32 sums of h_r w_e^T and dy_t w_e.
Order: as in grouped_linear.py. A row of y, dh or dq depends on its own token only.
"""

from collections.abc import Sequence

import torch

from .backend import on_triton
from .expert_rows import ExpertRows, Rows
from .grad import accumulate_dtype, check_dtype
from .grouped_linear import (
    add_bias,
    add_to_input_products,
    add_to_products,
    bias_gradient,
    check_experts,
    experts_of,
    products,
    weight_gradient,
    with_adapters,
)
from .linear import Adapted
from .low_rank import LowRank
from .order import sum_row
from .passes import ONE_SEQUENCE, Pass


def combine_experts_ref(
    h_RK: torch.Tensor,
    w: torch.Tensor,
    q_Tk: torch.Tensor,
    rows: ExpertRows,
    b: torch.Tensor | None = None,
    adapters: Sequence[LowRank] = (),
) -> torch.Tensor:
    """Forward only. -> [T, N]"""
    acc = accumulate_dtype(h_RK.dtype)
    y_rows = add_bias(products(h_RK, experts_of(w, rows), rows), b, rows)
    if adapters:
        add_to_products(y_rows, h_RK, adapters, rows)
    y_rows = y_rows.mul_(rows.of_slots(q_Tk).unsqueeze(1)).to(h_RK.dtype)
    return rows.sum_slots(y_rows.to(acc)).to(h_RK.dtype)


def _forward(
    h: torch.Tensor,
    w: torch.Tensor,
    adapters: Sequence[LowRank],
    q: torch.Tensor,
    rows: Rows,
    b: torch.Tensor | None,
) -> torch.Tensor:
    if not on_triton(h):
        return combine_experts_ref(h, w, q, rows, b, adapters)
    from .expert_rows_triton import sum_slots
    from .grouped_linear_triton import grouped_matmul

    w_ENK = experts_of(w, rows)
    if not adapters:
        return sum_slots(grouped_matmul(h, w_ENK, rows, x_of_tokens=False, q_Tk=q, b=b), rows)
    y_rows = add_to_products(products(h, w_ENK, rows), h, adapters, rows)
    return sum_slots(y_rows.mul_(q.view(-1)[rows.slots].unsqueeze(1)).to(h.dtype), rows)


def combine_bwd_ref(
    dy: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    q: torch.Tensor,
    rows: ExpertRows,
    b: torch.Tensor | None = None,
    adapters: Sequence[LowRank] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dh [R, K], dq [T, k], and q dy of each row, [R, N]."""
    acc = accumulate_dtype(h.dtype)
    dy_rows, q_rows = dy[rows.tokens].to(acc), rows.of_slots(q).unsqueeze(1)
    dot = products(dy_rows, experts_of(w, rows).transpose(1, 2), rows)
    if adapters:
        add_to_input_products(dot, dy_rows, adapters, rows)
    dq = sum_row(dot * h.to(acc))
    if b is not None:
        dq += sum_row(dy_rows * b.to(acc)[rows.expert_of_row])
    dq = dq[rows.places]
    return dot.mul_(q_rows).to(h.dtype), dq, dy_rows.mul_(q_rows).to(h.dtype)


def _backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    adapters: Sequence[LowRank],
    q: torch.Tensor,
    rows: Rows,
    b: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of combine_bwd_ref; on a GPU by the Triton kernels."""
    if not on_triton(h):
        return combine_bwd_ref(dy, h, w, q, rows, b, adapters)
    from .combine_experts_triton import add_bias_dots, combine_bwd
    from .expert_rows_triton import rows_of_tokens
    from .grouped_linear_triton import grouped_matmul

    w_EKN = experts_of(w, rows).transpose(1, 2)
    dot = grouped_matmul(dy, w_EKN, rows, x_of_tokens=True, dtype=torch.float32)
    if adapters:
        add_to_input_products(dot, rows_of_tokens(dy, rows), adapters, rows)
    dh, dq = combine_bwd(dot, h, q, rows)
    if b is not None:
        add_bias_dots(dq, dy, b, rows)
    return dh, dq, rows_of_tokens(dy, rows, q)


class _CombineExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, adapters, q, b, rows, in_pass):
        # w and b do not go through save_for_backward: their identity finds their buffers.
        ctx.save_for_backward(h, q)
        ctx.w, ctx.adapters, ctx.b, ctx.rows, ctx.in_pass = w, adapters, b, rows, in_pass
        return _forward(h, w, adapters, q, rows, b)

    @staticmethod
    def backward(ctx, dy):
        h, q = ctx.saved_tensors
        w, b, rows, in_pass, dw, db = ctx.w, ctx.b, ctx.rows, ctx.in_pass.over(dy), None, None
        dh, dq, dy_rows = _backward(dy, h, w, ctx.adapters, q, rows, b)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(w, ctx.adapters, dy_rows, h, rows, in_pass)
        if b is not None and ctx.needs_input_grad[4]:
            db = bias_gradient(b, dy_rows, rows, in_pass)
        return dh, dw, None, dq, db, None, None


def combine_experts(
    h: torch.Tensor,
    weight: torch.Tensor | Adapted,
    q: torch.Tensor,
    rows: Rows,
    in_pass: Pass = ONE_SEQUENCE,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """h [R, K] by the matrices w of the rows' experts, weighted by q [T, k] and summed -> [T, N].

    weight, b: see grouped_linear. in_pass: the token blocks are of the T tokens. Raises ValueError on a shape
    or dtype that does not fit.
    """
    w, adapters = with_adapters(weight)
    check_dtype("combine_experts", h=h, w=w, **({} if b is None else {"b": b}))
    check_experts("combine_experts", h, w, b, rows)
    if q.shape != rows.shape or q.dtype != accumulate_dtype(h.dtype):
        raise ValueError(
            f"combine_experts: q {tuple(q.shape)} in {q.dtype} must be {tuple(rows.shape)}, the slots "
            f"of the tokens, in {accumulate_dtype(h.dtype)}"
        )
    return _CombineExperts.apply(h, w, adapters, q, b, rows, in_pass)
