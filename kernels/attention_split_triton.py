"""A decoding turn of attention over chunks of keys on a GPU: many programs compute the chunks of a row.

`_split` computes the state of each chunk, `_merge` joins those of a row in ascending order. Formulas, order
and roundings are those of chunk_state_triton.py, so the bits are those of attention_chunks_triton.py.

A program of `_split` takes every `lanes`-th chunk of an item. An item is some tokens that see the same pages:
one token and all its chunks; or, where sequences share pages, the chunks that lie wholly in them, for several
tokens at once, and then for each token the rest. A state does not know who computed it.

Shapes: n tokens, one of each sequence; q, o [n, Hq, D]; pages [pages, page, Hkv, D]; states m, l
[n, Hq, chunks] and acc [n, Hq, chunks, D] in fp32.
Free, as no bit depends on them: items, lanes, the rows of a program, pages, neighbours, warps, stages.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .attention_chunks_triton import walk_options
from .attention_rule import AttentionRule
from .attention_tables import SharedChunks, Spans
from .chunk_state_triton import LOG2E, add_tile, join, join_sink, output, program_rows, tile_keys
from .launch import ceil_div, dense, launch, next_power_of_2, rows_contiguous
from .tiles import generation, multiprocessors

# Chunks that `_merge` reads before it joins them.
_AHEAD = 4
# Programs that share the chunks of an item, at least (where there are so many), and programs of all items for
# each multiprocessor.
_LANES, _PROGRAMS = 8, 4


@triton.jit(do_not_specialize=["table_stride", "heads", "chunks", "lanes"])
def _split(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    m_ptr,
    l_ptr,
    acc_ptr,
    sink_ptr,
    length_ptr,
    table_ptr,
    item_ptr,
    token_ptr,
    # scale, sizes, and the stride of the block table
    scale2,
    table_stride,
    heads,
    chunks,
    lanes,
    # strides, in elements
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_t,
    k_stride_h,
    v_stride_page,
    v_stride_t,
    v_stride_h,
    # constants
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """SINGLE: every row has one chunk, and its o is written. SHARED: items and tokens are given as tables.

    WINDOW, INNER: as in chunk_state_triton.add_tile. A chunk before all windows of an item is left out.
    """
    SLOTS: tl.constexpr = ROWS // GROUP
    item, h, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d, t = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    slot, head, in_d = row // GROUP, h * GROUP + row % GROUP, d < D
    if SHARED:
        place = tl.load(item_ptr + item * 3)
        first, end = tl.load(item_ptr + item * 3 + 1), tl.load(item_ptr + item * 3 + 2)
        token = tl.load(token_ptr + item * SLOTS + slot, mask=slot < SLOTS, other=-1).to(tl.int64)
    else:
        place, first, end = item, 0, chunks
        token = tl.where(slot == 0, item, -1).to(tl.int64)
    used = token >= 0
    # A row that pads a graph may have no key. It reads the first place of its table's first page.
    length = tl.where(used, tl.maximum(tl.load(length_ptr + token, mask=used, other=0), 1), 0)
    seen = tl.max(length, axis=0)
    stop = tl.minimum(end, tl.cdiv(seen, CHUNK))
    low = 0
    if WINDOW:  # the first key that a token of the item sees
        low = tl.maximum(tl.min(tl.where(used, length, seen), axis=0) - WINDOW, 0)
        first = tl.maximum(first, low // CHUNK)
    mask = used[:, None] & in_d[None, :]
    q = tl.load(q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    table = table_ptr + place.to(tl.int64) * table_stride
    for c in range(first + lane, stop, lanes):
        m, l = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        begin = tl.maximum(c * CHUNK, low // TILE * TILE) if WINDOW else c * CHUNK
        for j in range(begin, tl.minimum(c * CHUNK + CHUNK, seen), TILE):
            key = j + t
            in_range = key < seen
            page = tl.load(table + key // PAGE, mask=in_range, other=0).to(tl.int64)
            k_row = page * k_stride_page + (key % PAGE) * k_stride_t + h * k_stride_h
            v_row = page * v_stride_page + (key % PAGE) * v_stride_t + h * v_stride_h
            k_mask, v_mask = in_range[None, :] & in_d[:, None], in_range[:, None] & in_d[None, :]
            k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=k_mask, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + v_row[:, None] + d[None, :], mask=v_mask, other=0.0).to(q.dtype)
            last = length - 1
            m, l, acc = add_tile(q, k, v, m, l, acc, scale2, key, last, True, ROWS, TILE, WINDOW, INNER)
        state = token * heads + head
        if SINGLE:
            if sink_ptr is not None:
                m, l, acc = join_sink(m, l, acc, tl.load(sink_ptr + state, mask=used, other=0.0))
            o = output(l, acc).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + (state * D)[:, None] + d[None, :], o, mask=mask)
        else:
            state = state * chunks + c
            tl.store(m_ptr + state, m, mask=used)
            tl.store(l_ptr + state, l, mask=used)
            tl.store(acc_ptr + (state * D)[:, None] + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["heads", "chunks"])
def _merge(
    o_ptr,
    m_ptr,
    l_ptr,
    acc_ptr,
    sink_ptr,
    length_ptr,
    heads,
    chunks,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One row of o from the states of its chunks; those before the row's window may not be there."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, one = tl.arange(0, WIDTH)[None, :], tl.arange(0, 1)
    length = tl.maximum(tl.load(length_ptr + token), 1)
    n, begin = tl.cdiv(length, CHUNK), tl.maximum(length - WINDOW, 0) // CHUNK if WINDOW else 0
    state = (token * heads + head) * chunks
    M, L = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    A = tl.zeros([1, WIDTH], tl.float32)
    for c0 in range(begin, n, AHEAD):
        for i in tl.static_range(AHEAD):
            c = c0 + i + one
            m = tl.load(m_ptr + state + c, mask=c < n, other=float("-inf"))
            l = tl.load(l_ptr + state + c, mask=c < n, other=0.0)
            mask = (c < n)[:, None] & (d < D)
            acc = tl.load(acc_ptr + ((state + c) * D)[:, None] + d, mask=mask, other=0.0)
            M, L, A = join(M, L, A, m, l, acc)
    if sink_ptr is not None:
        M, L, A = join_sink(M, L, A, tl.load(sink_ptr + token * heads + head + one))
    o = output(L, A).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (token * heads + head) * D + d, o, mask=d < D)


class _Shape(NamedTuple):
    """Of a launch: the rows of a program, and the programs that share the chunks of an item."""

    rows: int
    chunks: int
    lanes: int


def _shape(q: torch.Tensor, spans: Spans, page: int, rule: AttentionRule) -> _Shape:
    group = q.shape[1] // spans.kv_heads
    rows = max(program_rows(q.dtype, generation(q.device)), next_power_of_2(group))
    chunks = ceil_div(spans.block_table.shape[1] * page, rule.chunk)
    filling = ceil_div(_PROGRAMS * multiprocessors(q.device), len(q) * spans.kv_heads)
    return _Shape(rows, chunks, min(chunks, max(_LANES, filling)))


def split_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token of each sequence against a cache that holds its key and value.

    q [n, Hq, D], k and v [pages, page, Hkv, D] -> [n, Hq, D]. sinks [n, Hq] in fp32, or None.
    """
    q, k, v = map(rows_contiguous, (q, k, v))
    (n, H, D), gpu, page, tile = q.shape, generation(q.device), k.shape[1], tile_keys(q.dtype)
    assert k.shape[2] == spans.kv_heads, (k.shape, spans.kv_heads)
    assert rule.chunk % tile == 0, (rule, tile)
    assert n == len(spans.seqused_k), (n, len(spans.seqused_k))
    shape = _shape(q, spans, page, rule)
    is_single, width = shape.chunks == 1, next_power_of_2(D)
    o = torch.empty(n, H, D, dtype=q.dtype, device=q.device)
    states: list[torch.Tensor | None] = [None] * 3
    if not is_single:
        states = [
            torch.empty(n, H, shape.chunks, *rest, dtype=torch.float32, device=q.device)
            for rest in ((), (), (D,))
        ]
    sinks = None if sinks is None else dense(sinks)
    items, tokens = (None, None) if spans.shared is None else spans.shared
    if items is not None:
        assert tokens.shape == (len(items), shape.rows // (H // spans.kv_heads)), tokens.shape
    launch(
        _split,
        (n if items is None else len(items), spans.kv_heads, shape.lanes),
        q,
        k,
        v,
        o,
        *states,
        sinks if is_single else None,
        spans.seqused_k,
        spans.block_table,
        items,
        tokens,
        (rule.cap or scale) * LOG2E,
        spans.block_table.stride(0),
        H,
        shape.chunks,
        shape.lanes,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        GROUP=H // spans.kv_heads,
        D=D,
        WIDTH=width,
        PAGE=page,
        ROWS=shape.rows,
        TILE=tile,
        CHUNK=rule.chunk,
        SINGLE=is_single,
        SHARED=items is not None,
        **rule.constants(scale),
        **walk_options(q.dtype, k.dtype, gpu, rule),
    )
    if not is_single:
        launch(
            _merge,
            (n, H),
            o,
            *states,
            sinks,
            spans.seqused_k,
            H,
            shape.chunks,
            D=D,
            WIDTH=width,
            CHUNK=rule.chunk,
            AHEAD=_AHEAD,
            WINDOW=rule.window,
            num_warps=1,
            num_stages=1,
        )
    return o


def no_chunks(n: int, q_heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> SharedChunks:
    """Room for the work of n tokens. An item takes as many tokens as a program of `_split` has rows for."""
    group = q_heads // kv_heads
    slots = max(program_rows(dtype, generation(device)), next_power_of_2(group)) // group
    items, tokens = (torch.zeros(2 * n, width, dtype=torch.int32, device=device) for width in (3, slots))
    return SharedChunks(items, tokens)
