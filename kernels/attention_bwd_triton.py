"""Causal grouped-query attention on a GPU, backward, without atomics: every gradient has one owner.

    delta_i = do_i . o_i     p_ij = exp(scale q_i . k_j - lse_i)     ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i p_ij do_i

There are two passes (FlashAttention-2, arXiv:2307.08691, without its atomic dq):

- `_backward_q`: a program owns the queries of one (sequence, head, tile). It walks the keys in ascending
  order, and it stores delta.
- `_backward_kv`: a program owns the keys and values of one (sequence, key-value head, tile). It walks the
  heads of the group, and for each head the queries in ascending order.

Shapes: q, o, do, dq [T, Hq, D]; k, v, dk, dv [K, Hkv, D] with K >= T; lse, delta [T, Hq] in fp32. All strides
but the last are free. The queries of a sequence are its last positions.
Roundings: p and ds are rounded to the dtype before they meet do, q and k. dq, dk and dv are rounded once
each. Everything else is in fp32 (ieee, never tf32).
Order: the tiles begin at the first position of a sequence, so a gradient depends on its own sequence only.
Positions without a query add exact zeros.
With a window, tiles that no row of a program sees are not read: they would add zeros to sums that begin with
+0.0. With a cap, s = cap t, t = tanh((scale / cap) (q . k)) by the forward's tanh, and ds has the factor
1 - t^2 (softcap_triton.py).

Most calls in 16 bits on Hopper have other tiles, and so other bits (attention_bwd_tma_triton.py).
"""

import torch
import triton
import triton.language as tl

from .attention_bwd_tma_triton import attention_bwd_tma
from .attention_rule import WALK, AttentionRule
from .attention_tables import Spans
from .attention_tma_triton import supports_tma
from .attention_triton import MOST_REGISTERS, find_tile
from .launch import launch, next_power_of_2, rows_contiguous
from .softcap_triton import tanh
from .tiles import generation


@triton.jit(do_not_specialize=["sequences", "heads"])
def _backward_q(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    cu_ptr,
    key_cu_ptr,
    # scale and sizes
    scale,
    sequences,
    heads,
    # strides, in elements
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    o_stride_t,
    o_stride_h,
    do_stride_t,
    do_stride_h,
    dq_stride_t,
    dq_stride_h,
    # constants
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    tile, h = tl.program_id(0), tl.program_id(1)
    seq, start, queries, first = find_tile(cu_ptr, tile, sequences, BLOCK_M)
    if first >= queries:
        return
    key_start = tl.load(key_cu_ptr + seq)
    length = tl.load(key_cu_ptr + seq + 1) - key_start
    context = length - queries
    d, n = tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    step = first + tl.arange(0, BLOCK_M)
    token, position, used = (start + step).to(tl.int64), context + step, step < queries
    mask = used[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (token * q_stride_t)[:, None] + (h * q_stride_h + d)[None, :], mask=mask, other=0.0)
    do = tl.load(
        do_ptr + (token * do_stride_t)[:, None] + (h * do_stride_h + d)[None, :], mask=mask, other=0.0
    )
    o = tl.load(o_ptr + (token * o_stride_t)[:, None] + (h * o_stride_h + d)[None, :], mask=mask, other=0.0)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta_ptr + token * heads + h, delta, mask=used)
    lse = tl.load(lse_ptr + token * heads + h, mask=used, other=float("inf"))
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    begin = tl.maximum(context + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    for j in range(begin, tl.minimum(context + first + BLOCK_M, length), BLOCK_N):
        key = j + n
        key_row = (key_start + key).to(tl.int64)
        key_mask = (key < length)[:, None] & (d < D)[None, :]
        k_tile = k_ptr + (key_row * k_stride_t)[:, None] + (h // GROUP * k_stride_h + d)[None, :]
        k = tl.load(k_tile, mask=key_mask, other=0.0)
        v_tile = v_ptr + (key_row * v_stride_t)[:, None] + (h // GROUP * v_stride_h + d)[None, :]
        v = tl.load(v_tile, mask=key_mask, other=0.0)
        if INNER != 0.0:
            t = tanh(tl.dot(q, tl.trans(k), input_precision="ieee") * INNER)
            e = tl.exp(tl.fma(t, CAP, -lse[:, None]))
        else:
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            e = tl.exp(s - lse[:, None])
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > (position - WINDOW)[:, None])
        p = tl.where(visible, e, 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        if INNER != 0.0:
            ds *= tl.fma(-t, t, 1.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq *= scale
    tl.store(
        dq_ptr + (token * dq_stride_t)[:, None] + (h * dq_stride_h + d)[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["sequences", "heads"])
def _backward_kv(
    # pointers
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_ptr,
    key_cu_ptr,
    # scale and sizes
    scale,
    sequences,
    heads,
    # strides, in elements
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    do_stride_t,
    do_stride_h,
    dk_stride_t,
    dk_stride_h,
    dv_stride_t,
    dv_stride_h,
    # constants
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq, key_start, length, first = find_tile(key_cu_ptr, tile, sequences, BLOCK_N)
    if first >= length:
        return
    start = tl.load(cu_ptr + seq)
    context = length - (tl.load(cu_ptr + seq + 1) - start)
    queries = length - context
    d, r = tl.arange(0, WIDTH), tl.arange(0, BLOCK_M)
    key = first + tl.arange(0, BLOCK_N)
    token, used = (key_start + key).to(tl.int64), key < length
    mask = used[:, None] & (d < D)[None, :]
    k = tl.load(
        k_ptr + (token * k_stride_t)[:, None] + (kv_head * k_stride_h + d)[None, :], mask=mask, other=0.0
    )
    v = tl.load(
        v_ptr + (token * v_stride_t)[:, None] + (kv_head * v_stride_h + d)[None, :], mask=mask, other=0.0
    )
    dk, dv = tl.zeros([BLOCK_N, WIDTH], tl.float32), tl.zeros([BLOCK_N, WIDTH], tl.float32)
    key_step = key - context  # the position of the key, counted from the first query
    end = tl.minimum(queries, first + BLOCK_N - 1 + WINDOW - context) if WINDOW else queries
    for h in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for i in range(tl.maximum(first, context) // BLOCK_M * BLOCK_M - context, end, BLOCK_M):
            step = i + r
            is_query = (step >= 0) & (step < queries)
            row = (start + step).to(tl.int64)
            q_mask = is_query[:, None] & (d < D)[None, :]
            q_tile = q_ptr + (row * q_stride_t)[:, None] + (h * q_stride_h + d)[None, :]
            q = tl.load(q_tile, mask=q_mask, other=0.0)
            do_tile = do_ptr + (row * do_stride_t)[:, None] + (h * do_stride_h + d)[None, :]
            do = tl.load(do_tile, mask=q_mask, other=0.0)
            lse = tl.load(lse_ptr + row * heads + h, mask=is_query, other=float("inf"))
            delta = tl.load(delta_ptr + row * heads + h, mask=is_query, other=0.0)
            if INNER != 0.0:
                t = tanh(tl.dot(k, tl.trans(q), input_precision="ieee") * INNER)
                e = tl.exp(tl.fma(t, CAP, -lse[None, :]))
            else:
                s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
                e = tl.exp(s - lse[None, :])
            visible = key_step[:, None] <= step[None, :]
            if WINDOW:
                visible = visible & (key_step[:, None] > (step - WINDOW)[None, :])
            p = tl.where(visible, e, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
            if INNER != 0.0:
                ds *= tl.fma(-t, t, 1.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    dk *= scale
    tl.store(
        dk_ptr + (token * dk_stride_t)[:, None] + (kv_head * dk_stride_h + d)[None, :],
        dk.to(dk_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        dv_ptr + (token * dv_stride_t)[:, None] + (kv_head * dv_stride_h + d)[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=mask,
    )


def attention_bwd(
    do, q, k, v, o, lse, spans: Spans, scale: float, rule: AttentionRule = WALK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of packed attention, contiguous. do, q, o [T, Hq, D]; k, v [K, Hkv, D]; lse [T, Hq]."""
    assert spans.cu_seqlens_k is not None
    if supports_tma(q, spans, generation(q.device)):
        return attention_bwd_tma(do, q, k, v, o, lse, spans, scale, rule)
    do, q, k, v = map(rows_contiguous, (do, q, k, v))
    (T, H, D), kv_heads, sequences = q.shape, spans.kv_heads, len(spans.seqused_k)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    width = next_power_of_2(D)
    q_options, kv_options = _tiles(q.dtype, width, generation(q.device), rule.window > 0)
    shape = {"GROUP": H // kv_heads, "D": D, "WIDTH": width, "CAP": rule.cap, **rule.constants(scale)}

    def strides(*tensors: torch.Tensor) -> list[int]:
        return [n for x in tensors for n in x.stride()[:2]]

    common = (spans.cu_seqlens_q, spans.cu_seqlens_k, scale, sequences, H)
    q_args = (q, k, v, o, do, lse, delta, dq, *common, *strides(q, k, v, o, do, dq))
    q_grid = (T // q_options["BLOCK_M"] + sequences, H)
    launch(_backward_q, q_grid, *q_args, **shape, **q_options)
    kv_args = (q, k, v, do, lse, delta, dk, dv, *common, *strides(q, k, v, do, dk, dv))
    kv_grid = (len(k) // kv_options["BLOCK_N"] + sequences, kv_heads)
    launch(_backward_kv, kv_grid, *kv_args, **shape, **kv_options)
    return dq, dk, dv


def _tiles(
    dtype: torch.dtype, width: int, gpu: str, has_window: bool = False
) -> tuple[dict[str, int], dict[str, int]]:
    """The queries and keys of a tile in the two passes, which order the sums. `gpu` is the GPU's generation.

    They are the largest tiles that spill no register with Triton 3.6 to 3.9. Those of heads above 128 were
    compiled with 3.7.1 and 3.9.0 in 16 bits; in fp32 they are smaller, and spill on AMD.
    """

    def tiles(queries: int, keys: int, num_warps: int) -> dict[str, int]:
        return {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": num_warps, "num_stages": 2}

    if width > 128 and dtype == torch.float32:
        return tiles(16, 16, 8), tiles(16, 16, 8) | {"num_stages": 1}
    if width > 128:
        if gpu == "amd":
            return tiles(32, 32, 4), tiles(16, 32, 8)
        registers = {"maxnreg": MOST_REGISTERS}
        return tiles(32, 32, 8) | registers, tiles(16, 32, 8) | registers
    if dtype == torch.float32:
        # Without maxnreg the compiler stops at 64 to 96 registers on Hopper and Ampere, and spills.
        narrow_window = gpu == "ampere" and width <= 64 and has_window
        q_registers = {"maxnreg": 128} if narrow_window or (gpu == "hopper" and width > 64) else {}
        kv_registers = {"maxnreg": 128} if gpu in ("ampere", "hopper") and width <= 64 else {}
        kv_warps = 8 if gpu == "ampere" and width > 64 else 4
        return tiles(32, 16, 8) | q_registers, tiles(16, 16, kv_warps) | kv_registers
    if gpu == "hopper":
        return tiles(64, 64, 8), tiles(32, 64, 8)
    if gpu == "ampere" and width <= 64:
        return tiles(64, 32, 8), tiles(16, 64, 8) | {"num_stages": 1}
    # Without maxnreg the compiler stops at 128 registers on Blackwell, and spills.
    kv_registers = {"maxnreg": 168} if gpu == "blackwell" and width <= 64 and has_window else {}
    return tiles(64, 32, 8), tiles(16, 64, 4 if gpu == "amd" else 8) | kv_registers
