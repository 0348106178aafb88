"""Packed causal attention on a GPU, forward, with tiles that travel through TMA: 16 bits, Hopper.

    s_ij = scale (q_i . k_j)   (j <= i)      o_i = sum_j exp(s_ij - m_i) v_j / l_i      lse_i = m_i + log l_i

The bits are those of attention_triton.py, whose programs have 16 rows; here a program has 64. What decides a
bit is the same: tiles of KEY_TILE keys in ascending order, the running maximum, p rounded to the dtype before
it meets v, and the order of the sum of p, which is written out (`row_sum`). The rows of a program, the
tensor-core instruction (both add chunks of 16 to one fp32 accumulator in ascending order), TMA, and a mask
that is left out where all keys of a tile are visible decide none (tests/triton/test_attention_tma.py;
benchmarks/device.sh kernels). attention_triton.py says which of the two kernels takes a call.

Shapes: q, o [T, Hq, D]; k, v [K, Hkv, D]; lse [T, Hq] in fp32. The heads of a token lie side by side.
`load_ragged` reads zeros past the last key that a program sees, so nothing of a neighbour is read.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from .attention_plan import KEY_TILE
from .attention_rule import WALK, AttentionRule
from .attention_sinks_triton import join_sink
from .attention_tables import TILE_ROWS, Spans
from .launch import dense, launch
from .matmul_tma_triton import readable
from .softcap_triton import tanh
from .tiles import through_tma

# The widths of a head that were compared and measured.
WIDTHS = (64, 128)


@triton.jit
def row_sum(p, ROWS: tl.constexpr):
    """The sum of 32 columns in the order of mma.sync with 4 warps along the columns. p [ROWS, 32] -> [ROWS].

    The neighbours of a thread first, then lanes 2 and 1 apart, then warps 2 and 1 apart. Every step adds two
    numbers, so no layout can change it.
    """
    p = tl.reshape(p, [ROWS, 2, 2, 2, 2, 2])  # warp (2 bits), lane (2 bits), column of the thread
    p = tl.sum(p, axis=5)
    p = tl.sum(p, axis=3)
    p = tl.sum(p, axis=3)
    p = tl.sum(p, axis=1)
    return tl.sum(p, axis=1)


@triton.jit(do_not_specialize=["heads"])
def _forward_tma(
    # pointers and descriptors of TMA
    q_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    sink_ptr,
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
    WANT_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """WINDOW and INNER: as in attention_triton.py."""
    POSITIONS: tl.constexpr = ROWS // GROUP
    h = tl.program_id(0)
    entry = table_ptr + tl.program_id(1) * 4
    token0, positions = tl.load(entry), tl.load(entry + 1)
    first, key_start = tl.load(entry + 2), tl.load(entry + 3)
    row, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    within, head = row // GROUP, h * GROUP + row % GROUP
    used = (row < POSITIONS * GROUP) & (within < positions)
    token = (token0 + within).to(tl.int64)
    q_tile = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :]
    q = tl.load(q_tile, mask=used[:, None], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.full([ROWS], 1.0, tl.float32)  # the first tile multiplies it by exp(-inf) = 0
    acc = tl.zeros([ROWS, D], tl.float32)
    seen = first + positions
    last = tl.where(used, first + within, -1)[:, None]
    begin = tl.maximum(first - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    for j in range(begin, seen, TILE):
        k = load_ragged(k_desc, key_start, seen, [j, h * D])
        v = load_ragged(v_desc, key_start, seen, [j, h * D])
        s = tl.zeros([ROWS, TILE], tl.float32)
        if INNER != 0.0:
            s += scale * tanh(INNER * tl.dot(q, k.T))
        else:
            s += scale * tl.dot(q, k.T)
        if j + TILE - 1 > first:
            s = tl.where((j + t)[None, :] <= last, s, float("-inf"))
        if WINDOW:
            s = tl.where((j + t)[None, :] > last - WINDOW, s, float("-inf"))
        high = tl.maximum(m, tl.max(s, axis=1))
        m_new = tl.where(high > float("-inf"), high, 0.0)  # an unused row has no key
        p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m - m_new)
        l = l * alpha + row_sum(p, ROWS)
        m = high if WINDOW else m_new
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v)
    if sink_ptr is not None:
        z = tl.load(sink_ptr + token * heads + head, mask=used, other=0.0)
        m, l, acc = join_sink(m, l, acc, z)
    acc = acc / l[:, None]
    o_tile = o_ptr + (token * heads + head)[:, None] * D + d[None, :]
    tl.store(o_tile, acc.to(o_ptr.dtype.element_ty), mask=used[:, None])
    if WANT_LSE:
        tl.store(lse_ptr + token * heads + head, m + tl.log(l), mask=used)


def supports_tma(q: torch.Tensor, spans: Spans, gpu: str) -> bool:
    """Whether these kernels, forward and backward, take the calls of a model of these widths.

    The backward has other bits than attention_bwd_triton.py, so lengths and addresses may not decide.
    """
    (_, H, D), dtype_fits = q.shape, through_tma(q.dtype, gpu)
    return dtype_fits and D in WIDTHS and H // spans.kv_heads <= 16 and spans.query_tiles is not None


def attention_tma(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    scale: float,
    want_lse: bool,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """attention_triton.attention_packed for a call that `supports_tma` accepts."""
    q, k, v = map(heads_readable, (q, k, v))
    (T, H, D), kv_heads = q.shape, spans.kv_heads
    o = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device) if want_lse else None
    launch(
        _forward_tma,
        (kv_heads, len(spans.query_tiles)),
        q,
        create_ragged_descriptor(heads_flat(k), [KEY_TILE, D]),
        create_ragged_descriptor(heads_flat(v), [KEY_TILE, D]),
        o,
        lse,
        None if sinks is None else dense(sinks),
        spans.query_tiles,
        rule.cap or scale,
        H,
        *q.stride()[:2],
        GROUP=H // kv_heads,
        D=D,
        WANT_LSE=want_lse,
        ROWS=TILE_ROWS,
        TILE=KEY_TILE,
        **rule.constants(scale),
        num_warps=4,
        num_stages=2 if D == 128 else 3,
    )
    return o, lse


def heads_readable(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] if TMA can read it with its heads side by side, else a copy that it can read."""
    if x.stride(1) == x.shape[2] and x.stride(2) == 1 and readable(heads_flat(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def heads_flat(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as [T, H * D], for heads that lie side by side."""
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1), x.storage_offset())
