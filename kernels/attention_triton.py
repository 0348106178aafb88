"""Causal grouped-query attention on a GPU, forward.

    s_ij = scale (q_i . k_j)   (j <= i)      o_i = sum_j exp(s_ij - m_i) v_j / l_i      lse_i = m_i + log l_i

Training, prefill, chunked prefill and decode have one arithmetic. One program owns BLOCK_M rows of one
(sequence, key-value head), with row = position * group + head in the group. The program walks the keys in
tiles of KEY_TILE, in ascending order, with a running maximum. This is the arithmetic of vLLM 0.32's
kernel_unified_attention, 2D (vllm/v1/attention/ops/triton_unified_attention.py). vLLM's tile of a prefill is
used for decode as well. A fully hidden tile is an exact no-op: the maximum stays, and exp(-inf) = 0 adds
zeros.

Shapes: q, o [T, Hq, D]. Keys and values lie in pages [pages, page, Hkv, D], or packed [K, Hkv, D]. All
strides but the last are free. The queries of a sequence are its last positions. Pages may be in a narrower
dtype than q: a tile is converted as it is read, which is exact.
Roundings: p is rounded to the dtype before it meets v. o is rounded once. Scores, maximum and sums are in
fp32; fp32 operands are multiplied as they are, never in tf32.
Masks and caps (AttentionRule): the tiles before a program's first window are not read. A row's maximum stays
-inf until it sees a key, so a tile that is hidden of it is a no-op here too. vLLM's kernel sets it to 0. With
a cap, s is cap tanh((scale / cap) (q . k)), by softcap_triton.py. A row's sink comes after all its keys
(attention_sinks_triton.py).
Order: BLOCK_M, KEY_TILE and WARPS are constants, because they lay out the sums along a row.
"""

import torch
import triton
import triton.language as tl

from .attention_plan import KEY_TILE
from .attention_rule import WALK, AttentionRule
from .attention_sinks_triton import join_sink
from .attention_tables import TILE_ROWS, Spans
from .attention_tma_triton import WIDTHS, attention_tma, row_sum, supports_tma
from .launch import dense, launch, next_power_of_2, rows_contiguous
from .softcap_triton import tanh
from .tiles import generation, through_tma

# Rows of one program (more only where a group has more heads), and its warps, which share the keys of a row.
BLOCK_M = 16
WARPS = 4
# Of a thread in 16 bits, for wide heads, windows and caps: the compiler stops earlier, and spills.
MOST_REGISTERS = 248
_TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])


@triton.jit
def find_tile(cu_ptr, tile, sequences, BLOCK: tl.constexpr):
    """The place of a tile of BLOCK positions among the packed sequences.

    Returns the tile's sequence, the first row of that sequence, its number of rows, and the tile's first
    position in it. Sequence s owns the tiles from number cu[s] // BLOCK + s on. A tile that begins past the
    end of its sequence is unused.
    """
    low, high = 0, sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // BLOCK + middle <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    start = tl.load(cu_ptr + seq)
    rows = tl.load(cu_ptr + seq + 1) - start
    return seq, start, rows, (tile - start // BLOCK - seq) * BLOCK


@triton.jit(do_not_specialize=["sequences", "table_stride", "heads"])
def _forward(
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
    scale,
    sequences,
    table_stride,
    heads,
    # strides, in elements
    q_stride_t,
    q_stride_h,
    o_stride_t,
    o_stride_h,
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
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WRITTEN_OUT: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """WINDOW: of AttentionRule. INNER: scale / cap, and `scale` is the cap; 0.0: no cap."""
    POSITIONS: tl.constexpr = BLOCK_M // GROUP
    tile, h = tl.program_id(0), tl.program_id(1)
    seq, start, queries, first = find_tile(cu_ptr, tile, sequences, POSITIONS)
    if first >= queries:
        return
    length = tl.load(length_ptr + seq)
    context = length - queries
    row, d, t = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH), tl.arange(0, TILE)
    step = first + row // GROUP
    head = h * GROUP + row % GROUP
    used = (row < POSITIONS * GROUP) & (step < queries)
    token = (start + step).to(tl.int64)
    in_d = d < D
    mask = used[:, None] & in_d[None, :]
    q = tl.load(q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :], mask=mask, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([BLOCK_M], 1.0, tl.float32)  # the first tile multiplies it by exp(-inf) = 0
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    seen = tl.minimum(context + first + POSITIONS, length)
    key_start = 0 if PAGE else tl.load(key_cu_ptr + seq)
    begin = tl.maximum(context + first - WINDOW + 1, 0) // TILE if WINDOW else 0
    for j in range(begin, tl.cdiv(seen, TILE)):
        key = j * TILE + t
        in_range = key < seen
        if PAGE:
            page_ptr = table_ptr + seq.to(tl.int64) * table_stride + key // PAGE
            page = tl.load(page_ptr, mask=in_range, other=0).to(tl.int64)
            k_row = page * k_stride_page + (key % PAGE) * k_stride_t
            v_row = page * v_stride_page + (key % PAGE) * v_stride_t
        else:
            k_row = (key_start + key).to(tl.int64) * k_stride_t
            v_row = (key_start + key).to(tl.int64) * v_stride_t
        k = tl.load(
            k_ptr + (k_row + h * k_stride_h)[None, :] + d[:, None],
            mask=in_range[None, :] & in_d[:, None],
            other=0.0,
        ).to(q.dtype)
        v = tl.load(
            v_ptr + (v_row + h * v_stride_h)[:, None] + d[None, :],
            mask=in_range[:, None] & in_d[None, :],
            other=0.0,
        ).to(q.dtype)
        s = tl.zeros([BLOCK_M, TILE], tl.float32)
        if INNER != 0.0:
            s += scale * tanh(INNER * tl.dot(q, k, input_precision="ieee"))
        else:
            s += scale * tl.dot(q, k, input_precision="ieee")
        s = tl.where(used[:, None] & (key[None, :] <= (context + step)[:, None]), s, float("-inf"))
        if WINDOW:
            s = tl.where(key[None, :] > (context + step - WINDOW)[:, None], s, float("-inf"))
        high = tl.maximum(m, tl.max(s, axis=1))
        m_new = tl.where(high > float("-inf"), high, 0.0)  # an unused row has no key
        p = tl.exp(s - m_new[:, None])
        p_sum = row_sum(p, BLOCK_M) if WRITTEN_OUT else tl.sum(p, axis=1)
        alpha = tl.exp(m - m_new)
        l = l * alpha + p_sum
        m = high if WINDOW else m_new
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
    if sink_ptr is not None:
        z = tl.load(sink_ptr + token * heads + head, mask=used, other=0.0)
        m, l, acc = join_sink(m, l, acc, z)
    acc = acc / l[:, None]
    tl.store(
        o_ptr + (token * o_stride_t + head * o_stride_h)[:, None] + d[None, :],
        acc.to(o_ptr.dtype.element_ty),
        mask=mask,
    )
    if WANT_LSE:
        tl.store(lse_ptr + token * heads + head, m + tl.log(l), mask=used)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    want_lse: bool,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over packed keys and values: q [T, Hq, D], k and v [K, Hkv, D].

    sinks [T, Hq] in fp32, or None.
    Returns o [T, Hq, D], contiguous, and lse [T, Hq] in fp32, or None where lse is not wanted.
    """
    assert spans.cu_seqlens_k is not None
    if supports_tma(q, spans, generation(q.device)):
        return attention_tma(q, k, v, spans, scale, want_lse, rule, sinks)
    return _launch(q, k.unsqueeze(0), v.unsqueeze(0), spans, scale, rule, 0, want_lse, sinks)


def attention_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens against a cache that holds their keys and values.

    q [T, Hq, D], k and v [pages, page, Hkv, D] -> [T, Hq, D]. sinks [T, Hq] in fp32, or None.
    """
    assert spans.block_table is not None
    return _launch(q, k, v, spans, scale, rule, k.shape[1], False, sinks)[0]


def _launch(
    q, k, v, spans: Spans, scale: float, rule: AttentionRule, page: int, want_lse: bool, sinks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = map(rows_contiguous, (q, k, v))
    (T, H, D), kv_heads = q.shape, spans.kv_heads
    assert k.shape[2] == kv_heads, (k.shape, kv_heads)
    group, sequences = H // kv_heads, len(spans.seqused_k)
    width, gpu = next_power_of_2(D), generation(q.device)
    many_rows = bool(page) and _fills_many_rows(q, k, T * group / sequences, gpu)
    block_m = TILE_ROWS if many_rows else max(BLOCK_M, next_power_of_2(group))
    o = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device) if want_lse else None
    table, key_starts = (spans.block_table, None) if page else (None, spans.cu_seqlens_k)
    options = _options(q.dtype, k.dtype, width, bool(page), many_rows, gpu)
    if gpu != "amd" and (width > 128 or rule.window or rule.cap):
        options = _options_of_more_registers(options, q.dtype, width, bool(page), gpu)
    launch(
        _forward,
        (T // (block_m // group) + sequences, kv_heads),
        q,
        k,
        v,
        o,
        lse,
        None if sinks is None else dense(sinks),
        spans.cu_seqlens_q,
        key_starts,
        spans.seqused_k,
        table,
        rule.cap or scale,
        sequences,
        table.stride(0) if page else 0,
        H,
        *q.stride()[:2],
        *o.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        GROUP=group,
        D=D,
        WIDTH=width,
        PAGE=page,
        WANT_LSE=want_lse,
        BLOCK_M=block_m,
        TILE=KEY_TILE,
        WRITTEN_OUT=many_rows,
        **rule.constants(scale),
        num_warps=WARPS,
        **options,
    )
    return o, lse


def _fills_many_rows(q: torch.Tensor, k: torch.Tensor, rows: float, gpu: str) -> bool:
    """Whether programs over pages have TILE_ROWS rows: where sequences bring so many on average (`rows`).

    So prompts are read by few programs. It decides no bit: on Hopper products of 16 and of 64 rows have the
    same bits in 16 bits, and the sum of a row is written out (attention_tma_triton.py).
    """
    group, D = q.shape[1] // k.shape[2], q.shape[2]
    fits = through_tma(q.dtype, gpu) and k.dtype == q.dtype and group <= BLOCK_M and D in WIDTHS
    return fits and rows >= TILE_ROWS


def _options_of_more_registers(
    options: dict[str, int], dtype: torch.dtype, width: int, paged: bool, gpu: str
) -> dict[str, int]:
    """Those of wide heads, windows and caps on NVIDIA's GPUs. In fp32 the compiler spills if it is told."""
    if dtype != torch.float32:
        return options | {"maxnreg": MOST_REGISTERS}
    if width <= 128 and gpu == "hopper":
        return {"num_stages": 3 if paged else 2}
    return {"num_stages": 2 if width > 128 and not paged and gpu != "ampere" else 1}


def _options(
    dtype: torch.dtype, key_dtype: torch.dtype, width: int, paged: bool, many_rows: bool, gpu: str
) -> dict[str, int]:
    """The key tiles in flight and, where the compiler must be told, the registers of a thread.

    These options decide no bit. They were found by compiling, so that nothing spills with Triton 3.6 to 3.9.
    The page numbers are fetched ahead too, and take every second stage: with 3 stages there is one buffer for
    keys, with 5 two, with 7 three.
    Tiles that are converted are not fetched ahead: a tile in flight keeps its converted copy in registers,
    which costs up to 400 bytes of spills a thread. On Ampere the compiler stops at 96 registers and spills 8
    bytes. `gpu` is the GPU's generation.
    """
    if gpu == "amd":  # its shared memory holds one tile less
        return {"num_stages": 1 if key_dtype != dtype else 2}
    if key_dtype != dtype:
        capped = gpu != "blackwell" or _TRITON < (3, 9)
        return {"num_stages": 1} | ({"maxnreg": 128 if gpu == "ampere" else 192} if capped else {})
    if dtype == torch.float32 and width >= 128 and not paged and gpu != "ampere":
        return {"num_stages": 1, "maxnreg": 168}
    if dtype == torch.float32 and width <= 64 and not paged and gpu == "ampere":
        return {"num_stages": 2}
    if paged and dtype != torch.float32:
        stages = 7 if gpu in ("hopper", "blackwell") and not many_rows else 5
        return {"num_stages": stages} | ({"maxnreg": 128} if gpu == "ampere" else {})
    return {"num_stages": 3} | ({"maxnreg": 128} if gpu == "ampere" and dtype != torch.float32 else {})
