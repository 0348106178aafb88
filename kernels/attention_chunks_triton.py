"""Attention over chunks of keys on a GPU, forward, by programs that walk all chunks of a row.

Formulas, order and roundings are those of chunk_state_triton.py. One program owns some rows of one (sequence,
key-value head), with row = position * group + head in the group, and joins the chunks in registers. Training,
prompts and prefill in chunks go here; a decoding turn goes to attention_split_triton.py, with the same bits.

Shapes: q, o [T, Hq, D]; lse [T, Hq] in fp32. Keys and values lie in pages [pages, page, Hkv, D], or packed
[K, Hkv, D]. The queries of a sequence are its last positions. Pages may be in a narrower dtype than q: a tile
is converted as it is read, which is exact.
Free, as no bit depends on them: the rows of a program, pages, neighbours, warps, stages.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .attention_rule import AttentionRule
from .attention_tables import Spans
from .attention_triton import find_tile
from .chunk_state_triton import LOG2E, add_tile, join, join_sink, log_sum_exp, output, program_rows, tile_keys
from .launch import dense, launch, next_power_of_2, rows_contiguous
from .tiles import generation


@triton.jit(do_not_specialize=["sequences", "table_stride", "heads"])
def _walk(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    sink_ptr,
    cu_ptr,
    key_cu_ptr,
    length_ptr,
    table_ptr,
    # scale, sizes, and the stride of the block table
    scale2,
    sequences,
    table_stride,
    heads,
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
    WANT_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """SINGLE: no row sees more than one chunk, so there is nothing to join. WINDOW, INNER: see add_tile."""
    POSITIONS: tl.constexpr = ROWS // GROUP
    # Of a sequence, the programs with most keys come first.
    tile, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq, start, queries, first = find_tile(cu_ptr, tile, sequences, POSITIONS)
    if first >= queries:
        return
    length = tl.load(length_ptr + seq)
    context = length - queries
    row, d, t = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    step, head = first + row // GROUP, h * GROUP + row % GROUP
    used = (row < POSITIONS * GROUP) & (step < queries)
    token = (start + step).to(tl.int64)
    in_d = d < D
    mask = used[:, None] & in_d[None, :]
    q = tl.load(q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    last = tl.where(used, context + step, -1)
    m, M = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    l, L = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    acc, A = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    seen = tl.minimum(context + first + POSITIONS, length)
    key_start = 0 if PAGE else tl.load(key_cu_ptr + seq)
    begin = tl.maximum(context + first - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    for j in range(begin, seen, TILE):
        key = j + t
        in_range = key < seen
        if PAGE:
            page_ptr = table_ptr + seq.to(tl.int64) * table_stride + key // PAGE
            page = tl.load(page_ptr, mask=in_range, other=0).to(tl.int64)
            k_row = page * k_stride_page + (key % PAGE) * k_stride_t
            v_row = page * v_stride_page + (key % PAGE) * v_stride_t
        else:
            k_row = (key_start + key).to(tl.int64) * k_stride_t
            v_row = (key_start + key).to(tl.int64) * v_stride_t
        k_tile = k_ptr + (k_row + h * k_stride_h)[None, :] + d[:, None]
        v_tile = v_ptr + (v_row + h * v_stride_h)[:, None] + d[None, :]
        k = tl.load(k_tile, mask=in_range[None, :] & in_d[:, None], other=0.0).to(q.dtype)
        v = tl.load(v_tile, mask=in_range[:, None] & in_d[None, :], other=0.0).to(q.dtype)
        masked = j + TILE - 1 > context + first
        m, l, acc = add_tile(q, k, v, m, l, acc, scale2, key, last, masked, ROWS, TILE, WINDOW, INNER)
        # In the one loop: a loop of chunks around it would drain its pipeline.
        if not SINGLE and (j + TILE) % CHUNK == 0:
            M, L, A = join(M, L, A, m, l, acc)
            m, l = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if not SINGLE:
        m, l, acc = join(M, L, A, m, l, acc)
    if sink_ptr is not None:
        z = tl.load(sink_ptr + token * heads + head, mask=used, other=0.0)
        m, l, acc = join_sink(m, l, acc, z)
    o = output(l, acc).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + ((token * heads + head) * D)[:, None] + d[None, :], o, mask=mask)
    if WANT_LSE:
        tl.store(lse_ptr + token * heads + head, log_sum_exp(m, l), mask=used)


def walk_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    rule: AttentionRule,
    want_lse: bool,
    longest: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over packed keys and values: q [T, Hq, D], k and v [K, Hkv, D].

    longest: a bound of the keys of a sequence. sinks [T, Hq] in fp32, or None. Returns o [T, Hq, D], and lse
    [T, Hq] in fp32, or None where it is not wanted.
    """
    assert spans.cu_seqlens_k is not None
    return _launch(q, k.unsqueeze(0), v.unsqueeze(0), spans, scale, rule, 0, want_lse, longest, sinks)


def walk_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens against a cache that holds their keys and values.

    q [T, Hq, D], k and v [pages, page, Hkv, D] -> [T, Hq, D]. sinks [T, Hq] in fp32, or None.
    """
    assert spans.block_table is not None
    longest = spans.block_table.shape[1] * k.shape[1]
    return _launch(q, k, v, spans, scale, rule, k.shape[1], False, longest, sinks)[0]


def _launch(
    q, k, v, spans: Spans, scale: float, rule: AttentionRule, page: int, want_lse: bool, longest: int, sinks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = map(rows_contiguous, (q, k, v))
    (T, H, D), kv_heads, gpu = q.shape, spans.kv_heads, generation(q.device)
    assert k.shape[2] == kv_heads, (k.shape, kv_heads)
    group, sequences, tile = H // kv_heads, len(spans.seqused_k), tile_keys(q.dtype)
    rows = max(program_rows(q.dtype, gpu), next_power_of_2(group))
    o = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device) if want_lse else None
    table = spans.block_table if page else None
    assert rule.chunk % tile == 0, (rule, tile)
    launch(
        _walk,
        (T // (rows // group) + sequences, kv_heads),
        q,
        k,
        v,
        o,
        lse,
        None if sinks is None else dense(sinks),
        spans.cu_seqlens_q,
        None if page else spans.cu_seqlens_k,
        spans.seqused_k,
        table,
        (rule.cap or scale) * LOG2E,
        sequences,
        table.stride(0) if page else 0,
        H,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        GROUP=group,
        D=D,
        WIDTH=next_power_of_2(D),
        PAGE=page,
        WANT_LSE=want_lse,
        ROWS=rows,
        TILE=tile,
        CHUNK=rule.chunk,
        SINGLE=longest <= rule.chunk,
        **rule.constants(scale),
        **walk_options(q.dtype, k.dtype, gpu, rule),
    )
    return o, lse


def walk_options(dtype: torch.dtype, key_dtype: torch.dtype, gpu: str, rule: AttentionRule) -> dict[str, Any]:
    """Warps and stages, so that nothing spills, and AMD's matrix instruction, which decides bits there.

    The compiler stops at 96 or 128 registers and spills, on Ampere, on Blackwell and in fp32, unless it is
    told more. Two launches spill still: the walk over several chunks on Hopper by Triton 3.9.0 (8 bytes of a
    thread), and shared chunks on Blackwell by 3.8.0.
    """
    if gpu == "amd":
        return {"num_warps": 4, "num_stages": 1, "matrix_instr_nonkdim": 16}
    if dtype == torch.float32 or key_dtype != dtype:
        return {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
    if rule.cap and gpu == "hopper":
        return {"num_warps": 8, "num_stages": 2}
    if gpu == "ampere":
        return {"num_warps": 4, "num_stages": 2, "maxnreg": 208}
    if gpu == "blackwell":
        return {"num_warps": 8, "num_stages": 1, "maxnreg": 248}
    return {"num_warps": 4, "num_stages": 2}
