"""The sum of a token's rows on a GPU, with the arithmetic of vLLM's CUDA moe_sum (csrc/moe).

    y_t = sum over the slots j of t of x_r, with the row r of the slot

Shapes: x [R, N]; y [T, N]; the rows are those of expert_rows_triton.py.
Roundings: y once.
Order: slot after slot from 0, in fp32.
"""

import torch
import triton
import triton.language as tl

from .expert_rows_triton import ExpertTables
from .launch import ceil_div, dense, launch

# Columns of one program, and its warps. They decide no bit: each element is a sum of its own.
TILE, WARPS = 1024, 4


@triton.jit
def _sum_slots(x_ptr, place_ptr, y_ptr, N, K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for j in range(K):
        row = tl.load(place_ptr + token * K + j).to(tl.int64)
        total += tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)


def sum_slots(x_RN: torch.Tensor, rows: ExpertTables) -> torch.Tensor:
    """The sum of each token's rows, [T, N] in the dtype of x."""
    (T, k), N = rows.shape, x_RN.shape[1]
    y = torch.empty(T, N, dtype=x_RN.dtype, device=x_RN.device)
    if T:
        launch(
            _sum_slots,
            (T, ceil_div(N, TILE)),
            dense(x_RN),
            rows.places,
            y,
            N,
            K=k,
            TILE=TILE,
            num_warps=WARPS,
        )
    return y
