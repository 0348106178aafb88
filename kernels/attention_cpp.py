"""Attention through the loops of cpp/attention.cpp and cpp/attention_bwd.cpp, with the bits of its reference.

The loops sum each product in one chain of fused multiply-adds. So do the small products of the library that
the reference calls, as far as a probe finds it (`forward_agrees`, `backward_agrees`). Elsewhere the reference
runs.

Shapes: as in attention.py. exp and log are torch's.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ..files.bitwise import equal
from .attention_plan import KEY_TILE, AttentionPlan
from .attention_ref import attention_bwd_ref, attention_ref, gather_tiles, join_sink
from .attention_rule import WALK, AttentionRule
from .cpp import call
from .cpp.row_sums import sum_lanes
from .order import ALIGN
from .rms_norm_cpp import tokens_apart

# Scores that one part of a call holds, so that they stay in a core's cache. It decides no bit: no row is cut,
# and in the backward no sequence.
_SCORES = 1 << 17
# Keys of a sequence in the backward, at most. It bounds the memory of one sequence's scores.
_LONGEST = 512
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
    arrays: list[np.ndarray]
    lowest: int  # block of the tables
    highest: int
    first: np.ndarray  # [T + 1], the key tiles of all rows before each token, for one head
    parts: list[tuple[int, int, int]]  # the first sequence and the end of each part, and its elements


def _forward_plan(plan: AttentionPlan, D: int) -> CppPlan:
    """The forward's plan for heads of width D.

    A sequence is cut into pieces, so that each has few scores. The keys before a piece are its context.
    """
    queries, contexts = (np.asarray(x, np.int64) for x in (plan.query_lengths, plan.contexts))
    most = np.maximum(1, _SCORES // (plan.heads * (queries + contexts + KEY_TILE)))
    sequence_of_piece = None
    if (queries > most).any():
        pieces = -(-queries // most)
        sequence_of_piece = np.repeat(np.arange(len(queries)), pieces)
        begin = (np.arange(len(sequence_of_piece)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most[
            sequence_of_piece
        ]
        queries, contexts = (
            np.minimum(most[sequence_of_piece], queries[sequence_of_piece] - begin),
            contexts[sequence_of_piece] + begin,
        )
    on = _cpp_plan(plan, queries, contexts, D, sequence_of_piece)
    bounds = on.first[np.append(on.arrays[0], on.first.size - 1)]
    return on._replace(parts=list(_parts(np.diff(bounds) * plan.heads * KEY_TILE)))


def _backward_plan(plan: AttentionPlan, D: int) -> CppPlan:
    """The backward's plan for heads of width D. Its sequences are whole, as their keys have one sum each."""
    sizes = np.empty(len(plan.query_lengths), np.int64)
    lengths = (np.asarray(x, np.int64) for x in (plan.query_lengths, plan.contexts))
    on = _cpp_plan(plan, *lengths, D)
    call("attention_bwd_sizes", None, ctypes.addressof(on.plan), len(sizes), sizes.ctypes.data)
    return on._replace(parts=list(_parts(sizes)))


def reads_cache(q: Tensor, tiles: Tensor, plan: AttentionPlan) -> bool:
    """Whether the loops can read these key tiles, and the plan is one of q and of them."""
    tables, blocks = plan.tables, len(tiles) // plan.kv_heads
    on = _kept(_forward_plan, plan, q.shape[-1])
    return (
        tiles.dtype == q.dtype
        and tiles.is_contiguous()
        and q.shape[:2] == (len(on.first) - 1, plan.heads)
        and max(plan.lengths) <= tables.shape[1] * KEY_TILE
        and on.lowest >= 0
        and on.highest < blocks
    )


def _kept(make: Callable[[AttentionPlan, int], CppPlan], plan: AttentionPlan, D: int) -> CppPlan:
    """What `make` makes, once for each width."""
    if (make, D) not in plan.for_cpp:
        plan.for_cpp[make, D] = make(plan, D)
    return plan.for_cpp[make, D]


def _cpp_plan(
    plan: AttentionPlan,
    queries: np.ndarray,
    contexts: np.ndarray,
    D: int,
    sequence_of_piece: np.ndarray | None = None,
) -> CppPlan:
    """A plan without parts, of pieces with these queries and contexts.

    sequence_of_piece: the sequence of each piece; None where each is whole.
    """
    starts = np.cumsum(queries) - queries
    position = np.arange(queries.sum()) + np.repeat(contexts - starts, queries)
    first = np.concatenate([[0], np.cumsum(position // KEY_TILE + 1)])
    if plan.tables is None:
        lengths = np.asarray(plan.lengths, np.int64)
        keys, pages, lowest, highest = np.cumsum(lengths) - lengths, 0, 0, 0
    else:
        keys, pages = np.ascontiguousarray(plan.tables, np.int64), plan.tables.shape[1]
        lowest, highest = int(keys.min()), int(keys.max())
    arrays = [starts, queries, contexts, keys if sequence_of_piece is None else keys[sequence_of_piece]]
    places = [a.ctypes.data for a in arrays]
    places.insert(4 if plan.tables is None else 3, 0)
    return CppPlan(_Plan(*places, pages, plan.heads, plan.kv_heads, D), arrays, lowest, highest, first, [])


def _parts(sizes: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Consecutive sequences of _SCORES elements at most together, or one: see CppPlan.parts."""
    start, total = 0, 0
    for s, size in enumerate(sizes.tolist()):
        if s > start and total + size > _SCORES:
            yield start, s, total
            start, total = s, 0
        total += size
    if len(sizes):
        yield start, len(sizes), total


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    scale: float,
    rule: AttentionRule,
    want_lse: bool,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o like q, and lse [T, Hq], or None where it is not wanted.

    k and v [K, Hkv, D]; or, where the plan has tables, k is the key tiles and v is not read. sinks [T, Hq].
    """
    T, H, D = q.shape
    on, q = _kept(_forward_plan, plan, D), tokens_apart(q)
    if plan.tables is None:
        k, v = tokens_apart(k), tokens_apart(v)
        v = v if v.stride(0) == k.stride(0) else v.contiguous()
        k = k if v.stride(0) == k.stride(0) else k.contiguous()
    o = torch.empty(T, H, D, dtype=q.dtype)
    m, l = torch.empty(2, T, H, dtype=torch.float32)
    place, first, lanes = ctypes.addressof(on.plan), on.first.ctypes.data, sum_lanes(KEY_TILE)
    tiles, factors = rule.chunk // KEY_TILE, None
    if sinks is not None:
        factors = torch.empty(T, H, 2, dtype=torch.float32)
    for a, b, elements in on.parts:
        e = torch.empty(elements, dtype=torch.float32)
        joins = torch.zeros(_joins(on, a, b, tiles), 2, dtype=torch.float32) if tiles else None
        rows = first, a, b, tiles, rule.window, e, joins
        call("attention_scores", q.dtype, place, q, q.stride(0), k, k.stride(0), scale, *rows, m)
        e.exp_()
        if joins is not None:
            joins.exp_()
        if factors is not None:
            tokens = slice(*_tokens(on, a, b))
            m[tokens], factors[tokens, :, 0], factors[tokens, :, 1] = join_sink(m[tokens], sinks[tokens])
        call("attention_outputs", q.dtype, place, k, v, k.stride(0), *rows, factors, lanes, o, l)
    return o, m.add_(l.log_()) if want_lse else None


def _tokens(on: CppPlan, a: int, b: int) -> tuple[int, int]:
    """The first token of sequences [a, b), and the end."""
    start, end = np.append(on.arrays[0], on.first.size - 1)[[a, b]]
    return int(start), int(end)


def _joins(on: CppPlan, a: int, b: int, tiles: int) -> int:
    """Places for the factors of all chunks of sequences [a, b): see chunk_place in attention.cpp."""
    start, end = _tokens(on, a, b)
    return on.plan.heads * int((on.first[end] - on.first[start]) // tiles + end - start)


def attention_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    plan: AttentionPlan,
    scale: float,
    rule: AttentionRule = WALK,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attention`."""
    on, do, q = _kept(_backward_plan, plan, q.shape[-1]), do.contiguous(), tokens_apart(q)
    k, v = k.contiguous(), v.contiguous()
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    place, queries, keys = ctypes.addressof(on.plan), (q, q.stride(0)), k.stride(0)
    for a, b, elements in on.parts:
        p = torch.empty(elements, dtype=torch.float32)
        call("attention_exponents", q.dtype, place, *queries, k, keys, lse, scale, a, b, rule.window, p)
        p.exp_()
        operands = place, do, *queries, k, v, keys, delta, scale, a, b, p
        call("attention_gradients", q.dtype, *operands, dq, dk, dv)
    return dq, dk, dv


def forward_agrees(heads: int, kv_heads: int, D: int, rule: AttentionRule, has_sinks: bool = False) -> bool:
    """Whether the forward has the bits of the reference for such heads. The loops know no cap."""
    probed = AttentionRule(KEY_TILE if rule.chunk else 0, KEY_TILE + 3 if rule.window else 0)
    return not rule.cap and _forward_agrees(heads // kv_heads, D, probed, has_sinks)


@cache
def _forward_agrees(group: int, D: int, rule: AttentionRule, has_sinks: bool) -> bool:
    if not sum_lanes(KEY_TILE):
        return False
    lengths = (1, 2 * KEY_TILE + 5, KEY_TILE)
    plan, q, k, v = _probe(lengths, (3, 0, KEY_TILE - 7), group, D)
    sinks = q[:, :, 0].contiguous() if has_sinks else None
    expected = attention_ref(q, gather_tiles(k, v, plan.rows), plan, 0.3, rule, sinks=sinks)
    return all(map(equal, attention_fwd(q, k, v, plan, 0.3, rule, True, sinks), expected))


def backward_agrees(plan: AttentionPlan, D: int) -> bool:
    """Whether the backward has the bits of the reference for these sequences."""
    group = plan.heads // plan.kv_heads
    longest = -(-max(plan.lengths) // ALIGN) * ALIGN
    lengths = range(ALIGN, longest + 1, ALIGN)
    return longest <= _LONGEST and all(_backward_agrees(L, group, D) for L in reversed(lengths))


@cache
def _backward_agrees(length: int, group: int, D: int) -> bool:
    before = length // 3
    plan, q, k, v = _probe((length, length - before), (0, before), group, D)
    o, lse = attention_ref(q, gather_tiles(k, v, plan.rows), plan, 0.3)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    do[: length // 4] *= 1e-43  # sums that underflow have the sign of what the library begins with
    do[length // 2 :: 3] = 0.0
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
    q[::5], q[::7], k[::4], v[::6] = 0.0, q[::7] * 1e-43, -k[::4].abs(), v[::6] * 1e-43
    return plan, q, k, v
