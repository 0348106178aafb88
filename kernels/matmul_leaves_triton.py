"""Matrix products by leaves on a GPU (leaves.py): each K in equal parts, whose fp32 sums a binary tree adds.

    y = tree( leaf_0, .., leaf_(G-1) )      leaf_g = the sum of x w^T over part g of K

Shapes: x [M, K]; w [N, K], a view with any strides; y [M, N] in fp32. K may be several widths one after
another, such as those of q, k and v: a leaf has an equal piece of each.
Roundings: none. fp32 operands are multiplied as they are (ieee).
Order: a program walks each leaf as _matmul walks K (matmul_triton.py), in tiles of BLOCK_K from the beginning
of each piece, from zero. BLOCK_K is that of the whole matrix, of which ranks may have parts, so it knows
neither leaves nor ranks. A leaf is added to its left neighbour once both are there, and so are the sums: a
binary counter, whose pending sums wait in memory, because registers hold one tile only. A product of few
leaves is therefore a subtree of that of many, and a rank has the bits of its part of the whole.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch
from .matmul_tma_triton import BAND, tile_place
from .tile_tables import DEFAULT_TABLE, TileTable
from .tiles import generation, matmul_tiles, multiprocessors


@triton.jit(do_not_specialize=["M"])
def _matmul_leaves(
    # pointers
    x_ptr,
    w_ptr,
    y_ptr,
    pending_ptr,
    # sizes
    M,
    N,
    first,
    second,
    third,
    # strides, in elements
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    # constants
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    LEAVES: tl.constexpr = 1 << LEVELS
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    r, c, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # The steps of a leaf, and those before the second and the third part of K.
    ends = tl.cdiv(first // LEAVES, BLOCK_K)
    ends_of_second = ends + tl.cdiv(second // LEAVES, BLOCK_K)
    steps = ends_of_second + tl.cdiv(third // LEAVES, BLOCK_K)
    pending = pending_ptr + tl.program_id(0) * LEVELS * SIZE + r[:, None] * BLOCK_N + c[None, :]
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, BAND)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        in_m, in_n = (m + r < M)[:, None], (n + c < N)[None, :]
        # Only the origin of a tile needs 64 bits.
        x_tile = x_ptr + m.to(tl.int64) * stride_xm + r[:, None] * stride_xm
        w_tile = w_ptr + n.to(tl.int64) * stride_wn + c[None, :] * stride_wn
        y_tile = y_ptr + m.to(tl.int64) * N + n + r[:, None] * N + c[None, :]
        for leaf in range(LEAVES):
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(steps):  # one loop for all parts: the pointers of several spill
                before, piece, start = 0, first // LEAVES, step * BLOCK_K
                if PARTS > 1:
                    before = tl.where(step < ends, 0, first)
                    piece = tl.where(step < ends, piece, second // LEAVES)
                    start = tl.where(step < ends, start, start - ends * BLOCK_K)
                if PARTS > 2:
                    before = tl.where(step < ends_of_second, before, first + second)
                    piece = tl.where(step < ends_of_second, piece, third // LEAVES)
                    start = tl.where(step < ends_of_second, start, (step - ends_of_second) * BLOCK_K)
                place = tl.cast(before + leaf * piece + start, tl.int64)
                x_step = x_tile + place * stride_xk + k[None, :] * stride_xk
                w_step = w_tile + place * stride_wk + k[:, None] * stride_wk
                if EVEN_K:
                    x, w = tl.load(x_step, mask=in_m, other=0.0), tl.load(w_step, mask=in_n, other=0.0)
                else:
                    x = tl.load(x_step, mask=in_m & (start + k < piece)[None, :], other=0.0)
                    w = tl.load(w_step, mask=in_n & (start + k < piece)[:, None], other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
            for level in tl.static_range(LEVELS):
                if (leaf + 1) % (2 << level) == 0:
                    acc = tl.load(pending + level * SIZE) + acc
            for level in tl.static_range(LEVELS):
                if (leaf + 1) % (2 << level) == 1 << level:
                    tl.store(pending + level * SIZE, acc)
            tl.debug_barrier()  # a thread may load what another one has stored
            if leaf + 1 == LEAVES:
                tl.store(y_tile, acc, mask=in_m & in_n)


def matmul_leaves(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    leaves: int,
    widths: tuple[int, ...],
    tiles: TileTable = DEFAULT_TABLE,
    ranks: int = 1,
) -> torch.Tensor:
    """x w^T in fp32, -> [M, N]: K in `leaves` parts, whose products are added pairwise.

    widths: of the parts of K, three at most, of each of which a leaf has a piece. ranks: that share w along
    K. The bits of a row depend on this row, w, the leaves, the ranks' whole K and `tiles` only.
    """
    (M, K), N, levels = x_MK.shape, w_NK.shape[0], leaves.bit_length() - 1
    assert sum(widths) == K, (widths, K)
    y = x_MK.new_empty(M, N, dtype=torch.float32)
    if not M:
        return y
    gpu, programs = generation(x_MK.device), multiprocessors(x_MK.device)
    t = matmul_tiles(M, N, K, x_MK.dtype, gpu, tiles, whole=(N, K * ranks))
    # Beside a tile of sums a thread holds a pending one, and wider tiles spill.
    bm, is_wide = min(t.block_m, 64 * 128 // t.block_k), x_MK.dtype == torch.float32
    bn, warps = (32, 4) if is_wide else (64, 8)
    t = t._replace(block_m=bm, block_n=min(t.block_n, bn), num_warps=warps)
    programs = min(programs, ceil_div(M, t.block_m) * ceil_div(N, t.block_n))
    pending = y.new_empty(programs * levels * t.block_m * t.block_n)
    launch(
        _matmul_leaves,
        (programs,),
        x_MK,
        w_NK,
        y,
        pending,
        M,
        N,
        *widths,
        *[0] * (3 - len(widths)),
        *x_MK.stride(),
        w_NK.stride(1),
        w_NK.stride(0),
        EVEN_K=all(width // leaves % t.block_k == 0 for width in widths),
        PARTS=len(widths),
        LEVELS=levels,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        BAND=BAND,
        PROGRAMS=programs,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )
    return y
