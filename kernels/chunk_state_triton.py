"""The state of a row of attention over chunks of keys, and what the kernels of this order do with it.

    a tile of keys:    s = q . k          m' = max(m, scale2 max s)      p = exp2(fma(s, scale2, -m'))
                       a = exp2(m - m')   l' = fma(l, a, row_sum(p))     acc' = a acc + round(p) v
    a chunk, joined:   M' = max(M, m)     a = exp2(M - M')               b = exp2(m - M')
                       L' = fma(l, b, L a)                               A' = fma(acc, b, A a)
    a sink, at last:   M' = max(M, z log2 e)                             a = exp2(M - M')    A' = A a
                       L' = fma(L, a, exp2(fma(z, log2 e, -M')))
    at the end:        o = A / L + 0.0    lse = (M + log2 L) ln 2        scale2 = scale log2 e, rounded once

A chunk begins with m = -inf, l = 0, acc = 0; a row with M = -inf, L = 0, A = 0. A chunk takes its tiles in
ascending order, and a row its chunks. What decides a bit: the chunk, the tile (`tile_keys`), the tree of
`row_sum`, and each fma, which is written out because a compiler may fuse either product of a sum. Products of
16 bits add groups of 16 to one fp32 accumulator in ascending order; in fp32 they are chains of fma.

Where a row sees no key of a tile or a chunk, m is -inf and 0 is subtracted; the state stays. Only a -0.0 of A
may become +0.0, and the last addition makes it so for all. So the tiles and chunks before a window are not
read. With a cap, s is tanh((scale / cap) (q . k)), by softcap_triton.py, and scale2 is cap log2 e.
"""

import math

import torch
import triton
import triton.language as tl

from .softcap_triton import tanh
from .tiles import through_tma

LOG2E = math.log2(math.e)
_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(math.log(2.0))


def tile_keys(dtype: torch.dtype) -> int:
    """Keys of a tile. They order the sums, so they depend on the dtype only."""
    return 32 if dtype == torch.float32 else 64


def program_rows(dtype: torch.dtype, gpu: str) -> int:
    """Rows of a program, in every form.

    Nothing promises that products of few and of many rows have the same bits where they are other
    instructions. So programs have as many rows as one instruction takes: wgmma 64 and tcgen05 128.
    """
    if dtype == torch.float32:
        return 16
    return 64 if through_tma(dtype, gpu) else 128 if gpu == "blackwell" else 16


@triton.jit
def row_sum(p, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The sum of 32 or 64 columns, [ROWS, TILE] -> [ROWS]. Each step adds two numbers in any layout.

    Column 8 j + 2 t + e: first the neighbours e, then the bits of j from the lowest, then those of t. In the
    layouts of mma and wgmma e and j lie in one thread, and t in four lanes.
    """
    if TILE == 64:
        p = tl.sum(tl.reshape(p, [ROWS, 2, 2, 2, 2, 2, 2]), axis=6)
        p = tl.sum(p, axis=3)
    else:
        p = tl.sum(tl.reshape(p, [ROWS, 2, 2, 2, 2, 2]), axis=5)
    p = tl.sum(p, axis=2)
    p = tl.sum(p, axis=1)
    p = tl.sum(p, axis=2)
    return tl.sum(p, axis=1)


@triton.jit
def finite(m):
    """What is subtracted of scores with the maximum m: 0 where no key is visible."""
    return tl.where(m > float("-inf"), m, 0.0)


@triton.jit
def add_tile(
    q,
    k,
    v,
    m,
    l,
    acc,
    scale2,
    key,
    last,
    masked,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    INNER: tl.constexpr,
):
    """A chunk's state after one more tile. q [ROWS, D], k [D, TILE], v [TILE, D].

    key [TILE]: the keys' positions. last [ROWS]: the last one that a row sees; masked: whether that matters.
    WINDOW: of AttentionRule. INNER: scale / cap; 0.0: no cap.
    """
    s = tl.dot(q, k, input_precision="ieee")
    if INNER != 0.0:
        s = tanh(s * INNER)
    if masked:
        s = tl.where(key[None, :] <= last[:, None], s, float("-inf"))
    if WINDOW:
        s = tl.where(key[None, :] > last[:, None] - WINDOW, s, float("-inf"))
    high = tl.maximum(m, tl.max(s, axis=1) * scale2)
    base = finite(high)
    p = tl.exp2(tl.fma(s, scale2, -base[:, None]))
    a = tl.exp2(m - base)
    l = tl.fma(l, a, row_sum(p, ROWS, TILE))
    return high, l, tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")


@triton.jit
def join(M, L, A, m, l, acc):
    """A row's state after one more chunk."""
    high = tl.maximum(M, m)
    base = finite(high)
    a, b = tl.exp2(M - base), tl.exp2(m - base)
    return high, tl.fma(l, b, L * a), tl.fma(acc, b[:, None], A * a[:, None])


@triton.jit
def join_sink(M, L, A, z):
    """A row's state after its sink z."""
    high = tl.maximum(M, z * _LOG2E)
    a = tl.exp2(M - high)
    return high, tl.fma(L, a, tl.exp2(tl.fma(z, _LOG2E, -high))), A * a[:, None]


@triton.jit
def output(L, A):
    """o before it is rounded."""
    return A / L[:, None] + 0.0


@triton.jit
def log_sum_exp(M, L):
    """lse, of which the backward makes the weights again."""
    return (M + tl.log2(L)) * _LN2
