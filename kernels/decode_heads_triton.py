"""Triton kernel of decode_heads.py: a decoding turn's qk_norm, rope and write to the cache, by one launch.

A program takes some query heads or key heads of one token, or some of its value heads. It has the operations
of `_qk_norm_fwd` (qk_norm_triton.py) and of `_rope` (rope_triton.py), with the rounding between them. The
sum of squares reads a head as `_qk_norm_fwd` does, so that the compiler gives it the same threads, order and
fusion. Then the two halves of a head are read again, as rope needs them in one thread.

Shapes, roundings: see decode_heads.py.
Order: that of qk_norm. tests/triton/ahead_of_time.py compares the compiled expressions.
"""

import torch
import triton
import triton.language as tl

from .attention_plan import KEY_TILE
from .launch import ceil_div, dense, launch
from .qk_norm_triton import BYTES, HEAD_COLUMNS, WARPS


@triton.jit
def _normed(x_ptr, wq_ptr, wk_ptr, place, cols, is_key, mask, r, HAS_NORM: tl.constexpr):
    """One half of some heads, normalised and rounded, in fp32. The same columns of both weights."""
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    if HAS_NORM:
        same_w = tl.zeros([x.shape[0], 1], dtype=tl.int32) + cols[None, :]
        w = tl.load(wq_ptr + same_w, mask=mask & ~is_key, other=1.0)
        w = tl.load(wk_ptr + same_w, mask=mask & is_key, other=w)
        x = (x.to(tl.float32) * r[:, None] * w.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _r_of_heads(x_ptr, h, H, D, eps, HEADS: tl.constexpr, TILE: tl.constexpr):
    """1 / rms of each head, as `_qk_norm_fwd` computes it."""
    sum_sq = tl.zeros([HEADS], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = (h < H)[:, None] & (cols < D)[None, :]
        place = h[:, None] * D + cols[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        sum_sq += tl.sum(tl.where(mask, x * x, 0.0), axis=1)
    rms = tl.sqrt(sum_sq / D + eps)
    return 1.0 / rms


@triton.jit
def _queries_and_keys(
    x_ptr,
    wq_ptr,
    wk_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    h,
    heads,
    H,
    D,
    eps,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """The heads h of one token. k_ptr: the token's place in the cache, of key head 0."""
    HALF: tl.constexpr = TILE // 2
    half = D // 2
    r = tl.zeros([HEADS], dtype=tl.float32)
    if HAS_NORM:
        r = _r_of_heads(x_ptr, h, H, D, eps, HEADS, TILE)
    cols = tl.arange(0, HALF)
    mask = (h < H)[:, None] & (cols < half)[None, :]
    is_key = tl.broadcast_to((h >= heads)[:, None], [HEADS, HALF])
    place = h[:, None] * D + cols[None, :]
    x1 = _normed(x_ptr, wq_ptr, wk_ptr, place, cols, is_key, mask, r, HAS_NORM)
    x2 = _normed(x_ptr + half, wq_ptr + half, wk_ptr + half, place, cols, is_key, mask, r, HAS_NORM)
    cos = tl.load(cos_ptr + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
    cos, sin = tl.broadcast_to(cos, HEADS, HALF), tl.broadcast_to(sin, HEADS, HALF)
    y1 = tl.fma(x1, cos, x2 * (-1.0 * sin)).to(q_ptr.dtype.element_ty)
    y2 = tl.fma(x1, sin, x2 * cos).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + place, y1, mask=mask & ~is_key)
    tl.store(q_ptr + half + place, y2, mask=mask & ~is_key)
    key_place = (h - heads)[:, None] * (2 * KEY_TILE * D) + cols[None, :]
    tl.store(k_ptr + key_place, y1.to(k_ptr.dtype.element_ty), mask=mask & is_key)
    tl.store(k_ptr + half + key_place, y2.to(k_ptr.dtype.element_ty), mask=mask & is_key)


@triton.jit
def _values(x_ptr, v_ptr, h, kv_heads, D, TILE: tl.constexpr, KEY_TILE: tl.constexpr):
    """The value heads h of one token. v_ptr: the token's place in the cache, of value head 0."""
    cols = tl.arange(0, TILE)
    mask = (h < kv_heads)[:, None] & (cols < D)[None, :]
    v = tl.load(x_ptr + h[:, None] * D + cols[None, :], mask=mask, other=0.0)
    place = h[:, None] * (2 * KEY_TILE * D) + cols[None, :]
    tl.store(v_ptr + place, v.to(v_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["heads", "kv_heads", "qk_programs"])
def _heads_to_cache(
    # pointers
    x_ptr,
    wq_ptr,
    wk_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    pages_ptr,
    block_ptr,
    offset_ptr,
    # strides, in elements
    x_stride_t,
    # sizes
    heads,
    kv_heads,
    qk_programs,
    D,
    eps,
    # constants
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H = heads + kv_heads
    page, offset = tl.load(block_ptr + token) * kv_heads, tl.load(offset_ptr + token)
    k_ptr = pages_ptr + page * (2 * KEY_TILE * D) + offset * D
    row = x_ptr + token * x_stride_t
    angle = token * (D // 2)
    if group < qk_programs:
        _queries_and_keys(
            row,
            wq_ptr,
            wk_ptr,
            cos_ptr + angle,
            sin_ptr + angle,
            q_ptr + token * heads * D,
            k_ptr,
            group * HEADS + tl.arange(0, HEADS),
            heads,
            H,
            D,
            eps,
            HAS_NORM,
            HEADS,
            TILE,
            KEY_TILE,
        )
    else:
        h = (group - qk_programs) * HEADS + tl.arange(0, HEADS)
        _values(row + H * D, k_ptr + KEY_TILE * D, h, kv_heads, D, TILE, KEY_TILE)


def heads_to_cache(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    pages: torch.Tensor,
    block: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """q [n, heads, D]. qkv [n, heads + 2 kv_heads, D], with D at most HEAD_COLUMNS; see decode_heads.py."""
    qkv = dense(qkv)
    (n, total, D), at_once = qkv.shape, BYTES // (HEAD_COLUMNS * qkv.element_size())
    kv_heads = (total - heads) // 2
    qk_programs = ceil_div(heads + kv_heads, at_once)
    wq, wk = (cos, cos) if weights is None else map(dense, weights)
    q = torch.empty(n, heads, D, dtype=qkv.dtype, device=qkv.device)
    launch(
        _heads_to_cache,
        (n, qk_programs + ceil_div(kv_heads, at_once)),
        qkv,
        wq,
        wk,
        dense(cos),
        dense(sin),
        q,
        pages,
        block,
        offset,
        total * D,
        heads,
        kv_heads,
        qk_programs,
        D,
        eps,
        HAS_NORM=weights is not None,
        HEADS=at_once,
        TILE=HEAD_COLUMNS,
        KEY_TILE=KEY_TILE,
        num_warps=WARPS,
    )
    return q
