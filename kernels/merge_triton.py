"""Triton kernel of merge.py: each element of the weight is read once and written once.

The launch switches the fusion of multiply and add off, so every operation rounds as the reference's does.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch

# The tile of one program, and its warps. They decide no bit: no element depends on another. A thread has 8
# neighbours of a row, which makes whole 16-byte accesses of 16-bit numbers.
ROWS, COLS, WARPS = 8, 128, 4


@triton.jit(do_not_specialize=["N", "rank"])
def _merge(y_ptr, w_ptr, b_ptr, a_ptr, N, K, rank, s, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(rank):
        b = tl.load(b_ptr + rows * rank + i, mask=rows < N, other=0.0)
        a = tl.load(a_ptr + i * K + cols, mask=cols < K, other=0.0)
        total = total + b[:, None] * a[None, :]
    mask = (rows < N)[:, None] & (cols < K)[None, :]
    place = rows[:, None] * K + cols[None, :]
    w = tl.load(w_ptr + place, mask=mask, other=0.0).to(tl.float32)
    y = total * s + w
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def merge(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> None:
    """Write w + s (b a) to `y`; merge.merge has checked the shapes."""
    N, K = w.shape
    launch(
        _merge,
        (ceil_div(N, ROWS), ceil_div(K, COLS)),
        y,
        w,
        b,
        a,
        N,
        K,
        a.shape[0],
        s,
        ROWS=ROWS,
        COLS=COLS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
