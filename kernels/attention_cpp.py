"""Attention through the loops of cpp/attention.cpp and cpp/attention_bwd.cpp, with the bits of its reference.

The loops sum each product in one chain of fused multiply-adds. So do the small products of the library that
the reference calls, as far as a probe finds it (`forward_agrees`, `backward_agrees`). Elsewhere the reference
runs.

Shapes: as in attention.py. exp and log are torch's.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ..files.bitwise import equal
from .attention_plan import KEY_TILE, AttentionPlan
from .cpp import call
from .cpp.row_sums import sum_lanes
from .order import ALIGN
from .rms_norm_cpp import tokens_apart

# Scores that one part of a call holds, so that they stay in a core's cache. A part has whole sequences, so it
# decides no bit.
_SCORES = 1 << 17
Tensor = torch.Tensor


class _Plan(ctypes.Structure):
    """Plan of cpp/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "queries", "contexts", "key_starts", "table")),
        *((name, ctypes.c_int64) for name in ("pages", "heads", "kv_heads", "D")),
    )


class CppPlan(NamedTuple):
    """An attention plan as the loops read it. It keeps the arrays alive."""

    plan: _Plan
    arrays: tuple[np.ndarray, ...]
    first: np.ndarray  # [T + 1], the key tiles of all rows before each token, for one head
    parts: list[tuple[int, int, int]]  # the first sequence and the end of each part, and its key tiles
    bwd_parts: list[tuple[int, int, int]]  # and its elements of p in the backward


def _cpp_plan(plan: AttentionPlan, D: int) -> CppPlan:
    """The plan for heads of width D, made once."""
    if D not in plan.for_cpp:
        plan.for_cpp[D] = _made_plan(plan, D)
    return plan.for_cpp[D]


def _made_plan(plan: AttentionPlan, D: int) -> CppPlan:
    queries, contexts = (np.asarray(x, np.int64) for x in (plan.query_lengths, plan.contexts))
    lengths = queries + contexts
    starts, key_starts = np.cumsum(queries) - queries, np.cumsum(lengths) - lengths
    table = None if plan.tables is None else np.ascontiguousarray(plan.tables, np.int64)
    position = np.arange(queries.sum()) + np.repeat(contexts - starts, queries)
    first = np.concatenate([[0], np.cumsum(position // KEY_TILE + 1)])
    arrays = (starts, queries, contexts) + ((key_starts,) if table is None else (table,))
    places = [a.ctypes.data for a in arrays]
    places[3:] = [places[3], 0] if table is None else [0, places[3]]
    pages = 0 if table is None else table.shape[1]
    ends = starts + queries
    tiles = (first[ends] - first[starts]) * plan.heads
    elements = 0 if table is not None else _bwd_elements(queries, contexts) * plan.heads
    return CppPlan(
        _Plan(*places, pages, plan.heads, plan.kv_heads, D),
        arrays,
        first,
        list(_parts(tiles, _SCORES // KEY_TILE)),
        [] if table is not None else list(_parts(elements, _SCORES)),
    )


def _bwd_elements(queries: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Elements of p of each sequence, for one head: see cpp/attention_bwd.cpp."""
    elements = np.zeros(len(queries), np.int64)
    for s, (n, context) in enumerate(zip(queries.tolist(), contexts.tolist(), strict=True)):
        end = context + n
        for a in range(context // KEY_TILE * KEY_TILE, end, KEY_TILE):
            rows = min(a + KEY_TILE, end) - max(a, context)
            elements[s] += rows * min(a + KEY_TILE, -(-end // ALIGN) * ALIGN)
    return elements


def _parts(sizes: np.ndarray, limit: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive sequences of `limit` at most together, or one: the first, the end, and their size."""
    start, total = 0, 0
    for s, size in enumerate(sizes.tolist()):
        if s > start and total + size > limit:
            yield start, s, total
            start, total = s, 0
        total += size
    if len(sizes):
        yield start, len(sizes), total


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """o like q, and lse [T, Hq], or None where it is not wanted.

    k and v [K, Hkv, D]; or, where the plan has tables, k is the key tiles and v is not read.
    """
    T, H, D = q.shape
    on, q = _cpp_plan(plan, D), tokens_apart(q)
    if plan.tables is None:
        k, v = tokens_apart(k), tokens_apart(v)
        v = v if v.stride(0) == k.stride(0) else v.contiguous()
        k = k if v.stride(0) == k.stride(0) else k.contiguous()
    o = torch.empty(T, H, D, dtype=q.dtype)
    m, l = torch.empty(2, T, H, dtype=torch.float32)
    place, first, lanes = ctypes.addressof(on.plan), on.first.ctypes.data, sum_lanes(KEY_TILE)
    for a, b, tiles in on.parts:
        e = torch.empty(tiles, KEY_TILE, dtype=torch.float32)
        call("attention_scores", q.dtype, place, q, q.stride(0), k, k.stride(0), scale, first, a, b, e, m)
        e.exp_()
        call("attention_outputs", q.dtype, place, k, v, k.stride(0), first, a, b, e, lanes, o, l)
    return o, m.add_(l.log_()) if want_lse else None


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attention`."""
    on, do, q = _cpp_plan(plan, q.shape[-1]), do.contiguous(), tokens_apart(q)
    k, v = k.contiguous(), v.contiguous()
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    place, queries, keys = ctypes.addressof(on.plan), (q, q.stride(0)), k.stride(0)
    for a, b, elements in on.bwd_parts:
        p = torch.empty(elements, dtype=torch.float32)
        call("attention_exponents", q.dtype, place, *queries, k, keys, lse, scale, a, b, p)
        p.exp_()
        operands = place, do, *queries, k, v, keys, delta, scale, a, b, p
        call("attention_gradients", q.dtype, *operands, dq, dk, dv)
    return dq, dk, dv


def forward_agrees(heads: int, kv_heads: int, D: int) -> bool:
    """Whether the forward has the bits of the reference for such heads."""
    return _forward_agrees(heads // kv_heads, D)


@cache
def _forward_agrees(group: int, D: int) -> bool:
    from .attention import attention_ref, gather_tiles

    if not sum_lanes(KEY_TILE):
        return False
    lengths = (1, 2 * KEY_TILE + 5, KEY_TILE)
    plan, q, k, v = _probe(lengths, (3, 0, KEY_TILE - 7), group, D)
    expected = attention_ref(q, gather_tiles(k, v, plan.rows), plan, 0.3)
    return all(map(equal, attention_fwd(q, k, v, plan, 0.3, True), expected))


def backward_agrees(plan: AttentionPlan, D: int) -> bool:
    """Whether the backward has the bits of the reference for these sequences."""
    group = plan.heads // plan.kv_heads
    longest = -(-max(plan.lengths) // ALIGN) * ALIGN
    return all(_backward_agrees(L, group, D) for L in range(ALIGN, longest + 1, ALIGN)[::-1])


@cache
def _backward_agrees(length: int, group: int, D: int) -> bool:
    from .attention import attention_bwd_ref, attention_ref, gather_tiles

    plan, q, k, v = _probe((length,), (0,), group, D)
    o, lse = attention_ref(q, gather_tiles(k, v, plan.rows), plan, 0.3)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    operands = do, q, k, v, o, lse, plan, 0.3
    return all(map(equal, attention_bwd(*operands), attention_bwd_ref(*operands)))


def _probe(
    lengths: tuple[int, ...], contexts: tuple[int, ...], group: int, D: int
) -> tuple[AttentionPlan, Tensor, Tensor, Tensor]:
    """A plan of two key heads, and random q, k and v in fp32."""
    plan = AttentionPlan(lengths, contexts, None, 2 * group, 2)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 2 * group, D, generator=g, dtype=torch.float32)
    k, v = torch.randn(2, sum(plan.lengths), 2, D, generator=g, dtype=torch.float32)
    return plan, q, k, v
