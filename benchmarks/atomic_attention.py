"""The attention's backward in one pass with atomics, to compare with kernels/attention_bwd_triton.py.

It is never used in training. It is the usual arrangement (FlashAttention-2, arXiv:2307.08691). A program owns
the keys and values of one tile, as `_backward_kv` does. It adds its share of dq to an fp32 buffer with atomic
additions. Their order changes from run to run, and so do dq's bits. Every score is computed once here, and
twice in our two passes. Tiles, warps, dtypes and shapes are those of our backward.
"""

import torch
import triton
import triton.language as tl
from zerokl.kernels.attention_bwd_triton import _tiles
from zerokl.kernels.attention_tables import Spans
from zerokl.kernels.attention_triton import find_tile
from zerokl.kernels.launch import launch
from zerokl.kernels.tiles import generation

# Rows of o and do that a program of `_delta` takes.
ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def _delta(o_ptr, do_ptr, delta_ptr, rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    index, mask = row[:, None] * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]
    o, do = tl.load(o_ptr + index, mask=mask, other=0.0), tl.load(do_ptr + index, mask=mask, other=0.0)
    tl.store(delta_ptr + row, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["sequences"])
def _backward(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    cu_ptr,
    scale,
    sequences,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    _, start, length, first = find_tile(cu_ptr, tile, sequences, BLOCK_N)
    if first >= length:
        return
    d, r = tl.arange(0, WIDTH), tl.arange(0, BLOCK_M)
    key = first + tl.arange(0, BLOCK_N)
    kv_index = ((start + key).to(tl.int64) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
    kv_mask = (key < length)[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + kv_index, mask=kv_mask, other=0.0)
    v = tl.load(v_ptr + kv_index, mask=kv_mask, other=0.0)
    dk, dv = tl.zeros([BLOCK_N, WIDTH], tl.float32), tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for h in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        for i in range(first // BLOCK_M * BLOCK_M, length, BLOCK_M):
            position = i + r
            row = (start + position).to(tl.int64) * HEADS + h
            index, mask = row[:, None] * D + d[None, :], (position < length)[:, None] & (d < D)[None, :]
            q, do = (
                tl.load(q_ptr + index, mask=mask, other=0.0),
                tl.load(do_ptr + index, mask=mask, other=0.0),
            )
            lse = tl.load(lse_ptr + row, mask=position < length, other=float("inf"))
            delta = tl.load(delta_ptr + row, mask=position < length, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            p = tl.where(key[:, None] <= position[None, :], tl.exp(s - lse[None, :]), 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = (p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            dq = tl.dot(tl.trans(ds), k, input_precision="ieee") * scale
            tl.atomic_add(dq_ptr + index, dq, mask=mask, sem="relaxed")
    tl.store(dk_ptr + kv_index, (dk * scale).to(dk_ptr.dtype.element_ty), mask=kv_mask)
    tl.store(dv_ptr + kv_index, dv.to(dv_ptr.dtype.element_ty), mask=kv_mask)


def attention_bwd_atomic(
    do, q, k, v, o, lse, spans: Spans, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of attention_bwd; the sums of dq have another order.

    do, q, o: [T, Hq, D]; k, v: [T, Hkv, D]; lse: [T, Hq]. The results are contiguous.
    """
    do, q, k, v, o = (x.contiguous() for x in (do, q, k, v, o))
    (T, H, D), kv_heads, sequences = q.shape, spans.kv_heads, len(spans.seqused_k)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv, delta = map(torch.empty_like, (k, v, lse))
    width = triton.next_power_of_2(D)
    tiles = _tiles(q.dtype, width, generation(q.device))[1]
    launch(_delta, (triton.cdiv(T * H, ROWS),), o, do, delta, T * H, D=D, WIDTH=width, ROWS=ROWS, num_warps=4)
    grid = (T // tiles["BLOCK_N"] + sequences, kv_heads)
    tensors = (q, k, v, do, lse, delta, dq, dk, dv, spans.cu_seqlens_q)
    shape = {"GROUP": H // kv_heads, "HEADS": H, "D": D, "WIDTH": width}
    launch(_backward, grid, *tensors, scale, sequences, **shape, **tiles)
    return dq.to(q.dtype), dk, dv
