"""Triton kernels of combine_experts.py: the gradients of the weighted sum of a token's experts.

The forward is a product of grouped_linear_triton.py, whose fp32 sum is multiplied by the routing weight
before its rounding, and then expert_rows_triton.sum_slots.

    dot_r = dy_t w_e     dq_tj = dot_r . h_r (+ dy_t . b_e)
    dh_r = q_tj dot_r    dw_e += sum of (q_tj dy_t)^T h_r

Shapes: dy [T, N]; dot, h, dh [R, K]; q, dq [T, k] in fp32. The rows are those of expert_rows_triton.py.
Roundings: dot is not rounded. dh is rounded once, and so is q dy, before its product with h.
Order: dot . h and dy . b are summed over tiles of TILE columns in a layout that the dtype fixes.
A row depends on its own token only.
"""

import torch
import triton
import triton.language as tl

from .expert_rows_triton import ExpertTables
from .launch import dense, launch, next_power_of_2

# Columns that a program reads at once, and its warps. They order the sum of dq.
TILE, WARPS = 1024, 4


@triton.jit
def _combine_bwd(dot_ptr, h_ptr, q_ptr, slot_ptr, dh_ptr, dq_ptr, K, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    q, total = tl.load(q_ptr + slot), tl.zeros([TILE], tl.float32)
    for start in range(0, K, TILE):
        cols = start + tl.arange(0, TILE)
        dot = tl.load(dot_ptr + row * K + cols, mask=cols < K, other=0.0)
        total += dot * tl.load(h_ptr + row * K + cols, mask=cols < K, other=0.0).to(tl.float32)
        tl.store(dh_ptr + row * K + cols, (dot * q).to(dh_ptr.dtype.element_ty), mask=cols < K)
    tl.store(dq_ptr + slot, tl.sum(total))


def combine_bwd(
    dot: torch.Tensor, h: torch.Tensor, q: torch.Tensor, rows: ExpertTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of h [R, K], rounded, and of q [T, k]. dot [R, K] fp32 is dy w of each row."""
    (R, K), dh, dq = h.shape, torch.empty_like(dense(h)), torch.empty_like(q)
    if R:
        launch(
            _combine_bwd,
            (R,),
            dense(dot),
            dense(h),
            q,
            rows.slots,
            dh,
            dq,
            K,
            TILE=TILE,
            num_warps=WARPS,
        )
    return dh, dq


@triton.jit
def _add_bias_dots(
    dq_ptr,
    dy_ptr,
    b_ptr,
    slot_ptr,
    first_ptr,
    N,
    E,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    ends = tl.load(first_ptr + 1 + experts, mask=experts < E, other=2147483647)
    expert = tl.sum((ends <= row).to(tl.int32)).to(tl.int64)
    slot, total = tl.load(slot_ptr + row), tl.zeros([TILE], tl.float32)
    token = (slot // SLOTS).to(tl.int64)
    for start in range(0, N, TILE):
        cols = start + tl.arange(0, TILE)
        dy = tl.load(dy_ptr + token * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += dy * tl.load(b_ptr + expert * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(dq_ptr + slot, tl.load(dq_ptr + slot) + tl.sum(total))


def add_bias_dots(dq: torch.Tensor, dy: torch.Tensor, b: torch.Tensor, rows: ExpertTables) -> None:
    """dq [T, k] += dy [T, N] times the bias of each slot's expert, of b [E, N]."""
    if not dq.numel():
        return
    launch(
        _add_bias_dots,
        (dq.numel(),),
        dq,
        dense(dy),
        dense(b),
        rows.slots,
        rows.first,
        b.shape[1],
        rows.experts,
        SLOTS=rows.shape[1],
        EXPERTS=next_power_of_2(rows.experts),
        TILE=TILE,
        num_warps=WARPS,
    )
