"""Packed causal attention on a GPU, backward, with tiles that travel through TMA: 16 bits, Hopper.

    delta_i = do_i . o_i     p_ij = exp(scale q_i . k_j - lse_i)     ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i p_ij do_i

The two passes are those of attention_bwd_triton.py, without atomics: every gradient has one owner. The bits
are other ones, because the tiles and the order of the sums are:

- `_backward_q_tma`: a program owns the rows of one tile of the forward. It walks the keys in ascending order,
  KEYS at a time. It stores delta.
- `_backward_kv_tma`: a program owns KEYS keys and values. It walks the queries in ascending order, QUERIES at
  a time, and for each of these steps the heads of the group.

The exponential is exp2 of a score that the scale and log2(e) multiply at once.

Shapes: q, o, do, dq [T, Hq, D]; k, v, dk, dv [K, Hkv, D] with K >= T; lse, delta [T, Hq] in fp32.
Roundings: p and ds are rounded to the dtype before they meet do, q and k. dq, dk and dv are rounded once
each. Everything else is in fp32.
Order: tiles begin at the first position of a sequence, so a gradient depends on its own sequence only.
Positions without a query add exact zeros. A step that begins before the first query (a prompt that is a
context) sets what comes before it to zeros itself: ragged TMA checks the end of a sequence, not its start.
Windows and caps are as in attention_bwd_triton.py.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_rule import WALK, AttentionRule
from .attention_tables import TILE_KEYS, TILE_ROWS, Spans
from .attention_tma_triton import heads_flat, heads_readable
from .launch import dense, launch
from .softcap_triton import tanh

LOG2E = tl.constexpr(1.4426950408889634)
# Queries of a step of the second pass. With 64 it spills registers.
QUERIES = 32


@triton.jit(do_not_specialize=["heads"])
def _backward_q_tma(
    # pointers and descriptors of TMA
    q_ptr,
    k_desc,
    v_desc,
    o_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    table_ptr,
    # scale and sizes
    scale,
    heads,
    # strides, in elements
    q_stride_t,
    q_stride_h,
    # constants
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    POSITIONS: tl.constexpr = ROWS // GROUP
    h = tl.program_id(0)
    entry = table_ptr + tl.program_id(1) * 4
    token0, positions = tl.load(entry), tl.load(entry + 1)
    first, key_start = tl.load(entry + 2), tl.load(entry + 3)
    row, d, n = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, KEYS)
    within, head = row // GROUP, h * GROUP + row % GROUP
    used = (row < POSITIONS * GROUP) & (within < positions)
    token = (token0 + within).to(tl.int64)
    dense_tile = (token * heads + head)[:, None] * D + d[None, :]
    q_tile = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :]
    q = tl.load(q_tile, mask=used[:, None], other=0.0)
    do = tl.load(do_ptr + dense_tile, mask=used[:, None], other=0.0)
    o = tl.load(o_ptr + dense_tile, mask=used[:, None], other=0.0)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta_ptr + token * heads + head, delta, mask=used)
    lse2 = tl.load(lse_ptr + token * heads + head, mask=used, other=float("inf")) * LOG2E
    last = tl.where(used, first + within, -1)
    seen = first + positions
    dq = tl.zeros([ROWS, D], tl.float32)
    begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else 0
    for j in range(begin, seen, KEYS):
        k = load_ragged(k_desc, key_start, seen, [j, h * D])
        v = load_ragged(v_desc, key_start, seen, [j, h * D])
        s, dp = tl.dot(q, k.T), tl.dot(do, v.T)
        if INNER != 0.0:
            t = tanh(s * INNER)
            p = tl.exp2(tl.fma(t, CAP * LOG2E, -lse2[:, None]))
        else:
            p = tl.exp2(s * (scale * LOG2E) - lse2[:, None])
        p = tl.where((j + n)[None, :] <= last[:, None], p, 0.0)
        if WINDOW:
            p = tl.where((j + n)[None, :] > last[:, None] - WINDOW, p, 0.0)
        ds = p * (dp - delta[:, None])
        if INNER != 0.0:
            ds *= tl.fma(-t, t, 1.0)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dq_ptr + dense_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=used[:, None])


@triton.jit
def _add_queries(
    dk,
    dv,
    k,
    v,
    q,
    do,
    lse2,
    delta,
    key_step,
    step,
    scale,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """dk (not yet scaled) and dv with the share of some queries of one head."""
    s, dp = tl.dot(k, q.T), tl.dot(v, do.T)
    if INNER != 0.0:
        t = tanh(s * INNER)
        p = tl.exp2(tl.fma(t, CAP * LOG2E, -lse2[None, :]))
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse2[None, :])
    p = tl.where(key_step[:, None] <= step[None, :], p, 0.0)
    if WINDOW:
        p = tl.where(key_step[:, None] > (step - WINDOW)[None, :], p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (dp - delta[None, :])
    if INNER != 0.0:
        ds *= tl.fma(-t, t, 1.0)
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit(do_not_specialize=["heads"])
def _backward_kv_tma(
    # pointers and descriptors of TMA
    q_desc,
    q_runs,
    k_ptr,
    v_ptr,
    do_desc,
    do_runs,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    table_ptr,
    # scale and sizes
    scale,
    heads,
    # strides, in elements
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    # constants
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    h = tl.program_id(0)
    entry = table_ptr + tl.program_id(1) * 6
    key0, keys, first = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    start, queries, context = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    d, r, n = tl.arange(0, D), tl.arange(0, QUERIES), tl.arange(0, KEYS)
    token, used = (key0 + n).to(tl.int64), n < keys
    k_tile = k_ptr + (token * k_stride_t)[:, None] + (h * k_stride_h + d)[None, :]
    v_tile = v_ptr + (token * v_stride_t)[:, None] + (h * v_stride_h + d)[None, :]
    k = tl.load(k_tile, mask=used[:, None], other=0.0)
    v = tl.load(v_tile, mask=used[:, None], other=0.0)
    dk, dv = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    key_step = tl.where(used, first + n - context, 1 << 30)  # counted from the first query
    begin = tl.maximum(first, context) // QUERIES * QUERIES - context
    # The T * Hq rows of lse are counted in 32 bits, as 64 would spill registers.
    # A step that begins before the first query: this part of the box is another sequence's, or no row at all.
    for g in tl.range(0, tl.where(begin < 0, GROUP, 0), num_stages=1):
        step, head = begin + r, h * GROUP + g
        asks = (step >= 0) & (step < queries)
        q = tl.where(asks[:, None], q_desc.load([start + begin, head * D]), 0.0)
        do = tl.where(asks[:, None], do_desc.load([start + begin, head * D]), 0.0)
        at_row = (start + step) * heads + head
        lse2 = tl.load(lse_ptr + at_row, mask=asks, other=float("inf")) * LOG2E
        delta = tl.load(delta_ptr + at_row, mask=asks, other=0.0)
        dk, dv = _add_queries(dk, dv, k, v, q, do, lse2, delta, key_step, step, scale, CAP, WINDOW, INNER)
    begin = tl.where(begin < 0, begin + QUERIES, begin)
    end = tl.minimum(queries, first + KEYS - 1 + WINDOW - context) if WINDOW else queries
    for i in range(0, tl.cdiv(tl.maximum(end - begin, 0), QUERIES) * GROUP):
        place, head = begin + i // GROUP * QUERIES, h * GROUP + i % GROUP
        step = place + r
        asks = step < queries
        q = load_ragged(q_runs, start, queries, [place, head * D])
        do = load_ragged(do_runs, start, queries, [place, head * D])
        at_row = (start + step) * heads + head
        lse2 = tl.load(lse_ptr + at_row, mask=asks, other=float("inf")) * LOG2E
        delta = tl.load(delta_ptr + at_row, mask=asks, other=0.0)
        dk, dv = _add_queries(dk, dv, k, v, q, do, lse2, delta, key_step, step, scale, CAP, WINDOW, INNER)
    out_tile = ((key0 + n).to(tl.int64) * (heads // GROUP) + h)[:, None] * D + d[None, :]
    tl.store(dk_ptr + out_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=used[:, None])
    tl.store(dv_ptr + out_tile, dv.to(dv_ptr.dtype.element_ty), mask=used[:, None])


def attention_bwd_tma(
    do, q, k, v, o, lse, spans: Spans, scale: float, rule: AttentionRule = WALK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """attention_bwd_triton.attention_bwd for a call that attention_tma_triton.supports_tma accepts."""
    # One token is contiguous with any stride between tokens, and TMA is given this stride.
    do, q, k, v = map(heads_readable, (dense(do), q, k, v))
    (_, H, D), kv_heads = q.shape, spans.kv_heads
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, shape = (
        torch.empty_like(lse),
        {"GROUP": H // kv_heads, "D": D, "CAP": rule.cap, **rule.constants(scale)},
    )
    keys = [create_ragged_descriptor(heads_flat(x), [TILE_KEYS, D]) for x in (k, v)]
    q_args = (q, *keys, o, do, lse, delta, dq, spans.query_tiles, scale, H, *q.stride()[:2])
    q_options = {"ROWS": TILE_ROWS, "KEYS": TILE_KEYS, "num_warps": 4, "num_stages": 2}
    launch(_backward_q_tma, (kv_heads, len(spans.query_tiles)), *q_args, **shape, **q_options)
    boxes = [(_boxes(x), create_ragged_descriptor(heads_flat(x), [QUERIES, D])) for x in (q, do)]
    kv_args = (*boxes[0], k, v, *boxes[1], lse, delta, dk, dv, spans.key_tiles, scale, H)
    strides = (*k.stride()[:2], *v.stride()[:2])
    kv_options = {"QUERIES": QUERIES, "KEYS": TILE_KEYS, "num_warps": 4, "num_stages": 2}
    launch(_backward_kv_tma, (kv_heads, len(spans.key_tiles)), *kv_args, *strides, **shape, **kv_options)
    return dq, dk, dv


def _boxes(x: torch.Tensor) -> TensorDescriptor:
    """Rows [T, Hq * D] that TMA reads in boxes of QUERIES rows of one head, zeros outside of the tensor."""
    (T, H, D), row_stride = x.shape, x.stride(0)
    return TensorDescriptor(heads_flat(x), [T, H * D], [row_stride, 1], [QUERIES, D])
