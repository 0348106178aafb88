"""Triton kernel of given_softmax.py: the weights of given experts, from the probabilities of topk_softmax.

Forward: topk_softmax_triton.topk_softmax_fwd gives all probabilities, as where the router chooses its own
experts. Then one program for each token takes the given p, and adds them one slot after another. The backward
is topk_softmax_triton.topk_softmax_bwd.

Roundings, order and shapes: see given_softmax.py.
"""

import torch
import triton
import triton.language as tl

from .launch import dense, launch, next_power_of_2
from .topk_softmax_triton import WARPS, topk_softmax_fwd


@triton.jit
def _given_weights(p_ptr, id_ptr, w_ptr, E, K: tl.constexpr, RENORMALISE: tl.constexpr, SLOTS: tl.constexpr):
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    p, ids = p_ptr + row * E, id_ptr + row * K
    w = tl.load(p + tl.load(ids + slot, mask=slot < K, other=0), mask=slot < K, other=0.0)
    if RENORMALISE:
        total = 0.0
        for j in range(K):
            total += tl.load(p + tl.load(ids + j))
        w *= tl.where(total > 0.0, tl.div_rn(1.0, total), 1.0)
    tl.store(w_ptr + row * K + slot, w, mask=slot < K)


def given_softmax_fwd(
    logits: torch.Tensor, ids: torch.Tensor, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, k] of the experts ids [T, k] int64, and all probabilities [T, E], both in fp32."""
    _, _, p = topk_softmax_fwd(logits, ids.shape[1], renormalise)
    w = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if len(p):
        given_weights(p, dense(ids), w, renormalise)
    return w, p


def given_weights(p: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, renormalise: bool) -> None:
    """Write the weights of ids [T, k] to w [T, k], from all probabilities p [T, E] in fp32. All are dense."""
    (T, k), E = ids.shape, p.shape[1]
    launch(
        _given_weights,
        (T,),
        p,
        ids,
        w,
        E,
        K=k,
        RENORMALISE=renormalise,
        SLOTS=next_power_of_2(k),
        num_warps=WARPS,
    )
