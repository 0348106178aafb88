"""Triton kernels of topk_softmax.py, with the arithmetic of vLLM's CUDA topkGating (csrc/moe).

Forward: one program for each token. First the maximum of the row, then exp(z - max) by CUDA's expf, and the
sum of these terms in vLLM's order: a lane adds its numbers one after another, and a butterfly adds the lanes.
Then each term times 1 / sum, with a correctly rounded division. The experts are chosen by k passes over the
row. A pass takes the largest p that is left, and of equal ones the lower index.

Backward: one program for each token, of whose experts the sum is written out.

Roundings and shapes: see topk_softmax.py.
Order: of the lanes as in topk_softmax.py; the slots one after another. A row depends on its own logits only.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .launch import dense, launch, next_power_of_2
from .order import LOAD_BYTES, lanes_of

# Warps of a program. They decide no bit: every sum is written out.
WARPS = 1


@triton.jit
def _lane_sum(
    logits, largest, E, LOADS: tl.constexpr, LOAD: tl.constexpr, LANES: tl.constexpr, LOG_LANES: tl.constexpr
):
    """The sum of exp(z - largest) of a row, [1]."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(LOADS * LOAD):
        expert = (i // LOAD * LANES + lane) * LOAD + i % LOAD
        z = tl.load(logits + expert, mask=expert < E, other=-float("inf")).to(tl.float32)
        total += expf(z - largest)
    for i in tl.static_range(LOG_LANES):  # lanes that lie half of the others apart
        total = tl.sum(tl.reshape(total, (2, LANES >> (i + 1))), axis=0)
    return total


@triton.jit
def _topk_softmax_fwd(
    # pointers
    logits_ptr,
    w_ptr,
    id_ptr,
    p_ptr,
    # sizes
    E,
    K: tl.constexpr,
    # constants
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOADS: tl.constexpr,
    LOAD: tl.constexpr,
    LANES: tl.constexpr,
    LOG_LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits, expert, slot = logits_ptr + row * E, tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    z = tl.load(logits + expert, mask=expert < E, other=-float("inf")).to(tl.float32)
    largest = tl.max(z)
    scale = tl.div_rn(1.0, _lane_sum(logits, largest, E, LOADS, LOAD, LANES, LOG_LANES))
    p = expf(z - largest) * scale
    tl.store(p_ptr + row * E + expert, p, mask=expert < E)
    # A maximum may pass over NaN, so a row of NaN is one of zeros until its experts are chosen.
    left = tl.where(expert < E, tl.where(p == p, p, 0.0), -1.0)
    w, ids, total = tl.zeros([SLOTS], tl.float32), tl.zeros([SLOTS], tl.int64), 0.0
    for j in range(K):
        most = tl.max(left)
        chosen = tl.min(tl.where(left == most, expert, EXPERTS))
        w, ids, total = tl.where(slot == j, most, w), tl.where(slot == j, chosen, ids), total + most
        left = tl.where(expert == chosen, -1.0, left)
    if RENORMALISE:
        w *= tl.where(total > 0.0, tl.div_rn(1.0, total), 1.0)
    w = tl.where(scale == scale, w, scale)  # the sum, and so the scale, is NaN where a p is
    tl.store(w_ptr + row * K + slot, w, mask=slot < K)
    tl.store(id_ptr + row * K + slot, ids, mask=slot < K)


@triton.jit
def _topk_softmax_bwd(
    dw_ptr, w_ptr, id_ptr, p_ptr, dz_ptr, E, K: tl.constexpr, RENORMALISE: tl.constexpr, EXPERTS: tl.constexpr
):
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    s = 0.0
    for j in range(K):
        s += tl.load(dw_ptr + row * K + j) * tl.load(w_ptr + row * K + j)
    dw, dz = tl.zeros([EXPERTS], tl.float32), tl.zeros([EXPERTS], tl.float32)
    for j in range(K):
        dw_j, is_chosen = tl.load(dw_ptr + row * K + j), expert == tl.load(id_ptr + row * K + j)
        if RENORMALISE:
            dz = tl.where(is_chosen, tl.load(w_ptr + row * K + j) * (dw_j - s), dz)
        else:
            dw = tl.where(is_chosen, dw_j, dw)
    if not RENORMALISE:
        dz = tl.load(p_ptr + row * E + expert, mask=expert < E, other=0.0) * (dw - s)
    tl.store(dz_ptr + row * E + expert, dz.to(dz_ptr.dtype.element_ty), mask=expert < E)


def topk_softmax_fwd(
    logits: torch.Tensor, k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights [T, k] in fp32, the ids [T, k] int64, and all probabilities [T, E] in fp32."""
    (T, E), device = logits.shape, logits.device
    w = torch.empty(T, k, dtype=torch.float32, device=device)
    ids = torch.empty(T, k, dtype=torch.int64, device=device)
    p = torch.empty(T, E, dtype=torch.float32, device=device)
    loads, lanes, load = lanes_of(E, LOAD_BYTES // logits.itemsize)
    if T:
        launch(
            _topk_softmax_fwd,
            (T,),
            dense(logits),
            w,
            ids,
            p,
            E,
            K=k,
            RENORMALISE=renormalise,
            EXPERTS=next_power_of_2(E),
            SLOTS=next_power_of_2(k),
            LOADS=loads,
            LOAD=load,
            LANES=lanes,
            LOG_LANES=lanes.bit_length() - 1,
            num_warps=WARPS,
        )
    return w, ids, p


def topk_softmax_bwd(
    dw: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    p: torch.Tensor,
    renormalise: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits, [T, E], rounded to `dtype`."""
    (T, E), k = p.shape, w.shape[1]
    dz = torch.empty(T, E, dtype=dtype, device=p.device)
    if T:
        launch(
            _topk_softmax_bwd,
            (T,),
            dense(dw),
            w,
            ids,
            p,
            dz,
            E,
            K=k,
            RENORMALISE=renormalise,
            EXPERTS=next_power_of_2(E),
            num_warps=WARPS,
        )
    return dz
