"""Triton kernel of given_softmax.py: the softmax of topk_softmax_triton.py, and the weights of given experts.

Forward: one program for each token. The probabilities are those of topk_softmax, bit for bit. The given p are
taken one slot after another, and added in this order. The backward is topk_softmax_triton.topk_softmax_bwd.

Roundings, order and shapes: see given_softmax.py.
"""

import torch
import triton
import triton.language as tl

from .launch import dense, launch, next_power_of_2
from .topk_softmax import LOAD_BYTES, lanes_of
from .topk_softmax_triton import WARPS, probabilities


@triton.jit
def _given_softmax_fwd(
    # pointers
    logits_ptr,
    id_ptr,
    w_ptr,
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
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    p = probabilities(logits_ptr + row * E, E, EXPERTS, LOADS, LOAD, LANES, LOG_LANES)
    tl.store(p_ptr + row * E + expert, p, mask=expert < E)
    w, total = tl.zeros([SLOTS], tl.float32), 0.0
    for j in range(K):
        given = tl.load(id_ptr + row * K + j)
        p_j = tl.sum(tl.where(expert == given, p, 0.0))  # one number and zeros
        w, total = tl.where(slot == j, p_j, w), total + p_j
    if RENORMALISE:
        w *= tl.where(total > 0.0, tl.div_rn(1.0, total), 1.0)
    tl.store(w_ptr + row * K + slot, w, mask=slot < K)


def given_softmax_fwd(
    logits: torch.Tensor, ids: torch.Tensor, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, k] of the experts ids [T, k] int64, and all probabilities [T, E], both in fp32."""
    (T, E), k, device = logits.shape, ids.shape[1], logits.device
    w = torch.empty(T, k, dtype=torch.float32, device=device)
    p = torch.empty(T, E, dtype=torch.float32, device=device)
    loads, lanes, load = lanes_of(E, LOAD_BYTES // logits.itemsize)
    if T:
        launch(
            _given_softmax_fwd,
            (T,),
            dense(logits),
            dense(ids),
            w,
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
    return w, p
