"""Triton kernels of sigmoid_router.py. One program for each token, which has its whole row of logits.

Choice: the groups are chosen by one pass for each, and then the experts. A pass takes the largest number that
is left, and of equal ones the lower index. Weights and their gradient: the slots one after another.

Roundings, order and shapes: see sigmoid_router.py. exp is CUDA's expf, and divisions are correctly rounded.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .launch import dense, launch, next_power_of_2
from .sigmoid_router import TINY

# Warps of a program. They decide no bit: every sum is written out.
WARPS = 1


@triton.jit
def _row(z_ptr, row, E, EXPERTS: tl.constexpr):
    """The scores of a row, [EXPERTS] fp32, and the number of its logits that are not finite."""
    expert = tl.arange(0, EXPERTS)
    z = tl.load(z_ptr + row * E + expert, mask=expert < E, other=0.0).to(tl.float32)
    bad = tl.sum(tl.where(z - z == 0.0, 0, 1))
    return tl.div_rn(1.0, 1.0 + expf(-1.0 * z)), bad


@triton.jit
def _sigmoid_choose(
    z_ptr,
    bias_ptr,
    id_ptr,
    E,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
):
    row, expert, slot = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    s, bad = _row(z_ptr, row, E, EXPERTS)
    c = s + tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
    c = tl.where(expert < E, tl.where(bad > 0, 0.0, c), -float("inf"))
    if GROUPS > 1:
        group_slot, group = tl.arange(0, GROUP_SLOTS), expert // (E // GROUPS)
        sums = tl.full([GROUP_SLOTS], -float("inf"), tl.float32)
        for g in range(GROUPS):
            of_group = tl.where(group == g, c, -float("inf"))
            first = tl.max(of_group)
            place = tl.min(tl.where(of_group == first, expert, EXPERTS))
            second = tl.max(tl.where(expert == place, -float("inf"), of_group))
            sums = tl.where(group_slot == g, first + second, sums)
        kept = tl.zeros([EXPERTS], tl.int32)
        for _ in range(TOP_GROUPS):
            most = tl.max(sums)
            best = tl.min(tl.where(sums == most, group_slot, GROUP_SLOTS))
            kept = tl.where(group == best, 1, kept)
            sums = tl.where(group_slot == best, -float("inf"), sums)
        c = tl.where(kept > 0, c, -float("inf"))
    ids = tl.zeros([SLOTS], tl.int64)
    for j in range(K):
        most = tl.max(c)
        chosen = tl.min(tl.where(c == most, expert, EXPERTS))
        ids = tl.where(slot == j, chosen, ids)
        c = tl.where(expert == chosen, -float("inf"), c)
    tl.store(id_ptr + row * K + slot, ids, mask=slot < K)


@triton.jit
def _of(s, ids, j, expert):
    """The score of the expert in slot j: one number and zeros."""
    return tl.sum(tl.where(expert == tl.load(ids + j), s, 0.0))


@triton.jit
def _sigmoid_weigh(
    z_ptr,
    id_ptr,
    w_ptr,
    E,
    scale,
    tiny,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row, expert, slot = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    s, bad = _row(z_ptr, row, E, EXPERTS)
    ids, w, total = id_ptr + row * K, tl.zeros([SLOTS], tl.float32), 0.0
    for j in range(K):
        s_j = _of(s, ids, j, expert)
        w, total = tl.where(slot == j, s_j, w), total + s_j
    if RENORMALISE:
        w = tl.div_rn(w, tl.zeros([SLOTS], tl.float32) + (total + tiny))
    w = tl.where(bad > 0, float("nan"), w * scale)
    tl.store(w_ptr + row * K + slot, w, mask=slot < K)


@triton.jit
def _sigmoid_weigh_bwd(
    dw_ptr,
    z_ptr,
    id_ptr,
    dz_ptr,
    E,
    scale,
    tiny,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    s, bad = _row(z_ptr, row, E, EXPERTS)
    ids, total, t = id_ptr + row * K, 0.0, 0.0
    for j in range(K):
        total += _of(s, ids, j, expert)
    total += tiny
    if RENORMALISE:
        for j in range(K):
            t += tl.load(dw_ptr + row * K + j) * tl.div_rn(_of(s, ids, j, expert), total)
    dz = tl.zeros([EXPERTS], tl.float32)
    for j in range(K):
        ds = tl.load(dw_ptr + row * K + j)
        if RENORMALISE:
            ds = tl.div_rn(ds - t, total)
        chosen = expert == tl.load(ids + j)
        dz = tl.where(chosen, tl.where(bad > 0, float("nan"), scale * ds * s * (1.0 - s)), dz)
    tl.store(dz_ptr + row * E + expert, dz.to(dz_ptr.dtype.element_ty), mask=expert < E)


def choose(logits: torch.Tensor, bias: torch.Tensor, k: int, groups: int, top_groups: int) -> torch.Tensor:
    """The ids [T, k] int64. logits [T, E], bias [E] fp32."""
    T, E = logits.shape
    ids = torch.empty(T, k, dtype=torch.int64, device=logits.device)
    if T:
        launch(
            _sigmoid_choose,
            (T,),
            dense(logits),
            dense(bias),
            ids,
            E,
            K=k,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            EXPERTS=next_power_of_2(E),
            SLOTS=next_power_of_2(k),
            GROUP_SLOTS=next_power_of_2(groups),
            num_warps=WARPS,
        )
    return ids


def weigh(logits: torch.Tensor, ids: torch.Tensor, renormalise: bool, scale: float) -> torch.Tensor:
    """The weights [T, k] fp32 of the experts ids [T, k]. logits [T, E]."""
    (T, E), k = logits.shape, ids.shape[1]
    w = torch.empty(T, k, dtype=torch.float32, device=logits.device)
    if T:
        launch(
            _sigmoid_weigh,
            (T,),
            dense(logits),
            dense(ids),
            w,
            E,
            scale,
            TINY,
            K=k,
            RENORMALISE=renormalise,
            EXPERTS=next_power_of_2(E),
            SLOTS=next_power_of_2(k),
            num_warps=WARPS,
        )
    return w


def weigh_bwd(
    dw: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, renormalise: bool, scale: float
) -> torch.Tensor:
    """The gradient of the logits, [T, E], in their dtype. dw [T, k] fp32."""
    (T, E), k = logits.shape, ids.shape[1]
    dz = torch.empty(T, E, dtype=logits.dtype, device=logits.device)
    if T:
        launch(
            _sigmoid_weigh_bwd,
            (T,),
            dense(dw),
            dense(logits),
            dense(ids),
            dz,
            E,
            scale,
            TINY,
            K=k,
            RENORMALISE=renormalise,
            EXPERTS=next_power_of_2(E),
            num_warps=WARPS,
        )
    return dz
