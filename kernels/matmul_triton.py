"""Matrix products on a GPU: forward, input gradient, and weight gradient in canonical order.

    y = x w^T + b        dx = dy w        dw += sum over token blocks of dy_b^T x_b

Shapes: x [M, K]; w [N, K], a view with any strides; b [N]; y [M, N]. For dw: dy [T, N]; x [T, K];
dw [shards, N, K] in fp32.
Roundings: y is rounded once. The bias is added to the fp32 sum before the rounding, as in vLLM's
matmul_kernel_persistent. dw is not rounded. fp32 operands are multiplied as they are (ieee), never rounded to
tf32.
Order: for y, a program walks tiles of BLOCK_K along K in ascending order, with one fp32 accumulator. This is
the arithmetic of vLLM 0.32's matmul_kernel_persistent. BLOCK_K depends on (N, K, dtype), on the GPU's
generation, and on the table that the call is given (tiles.py). For dw, one program owns one tile of one
shard. The program begins with the value of the buffer, and adds chunks of tokens in the order of the token
blocks. No chunk has tokens of two blocks. So a sum that stops at the end of a block and goes on in a later
call has the same bits. There are no atomics and no split sums.

Products of many rows in 16 bits on Hopper have the same sums in another kernel (matmul_tma_triton.py).
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch, rows_contiguous
from .matmul_tma_triton import BAND, add_outer_tma, matmul_tma, readable, tile_place
from .order import Runs, TokenBlocks
from .tile_tables import DEFAULT_TABLE, TileTable
from .tiles import (
    Tiles,
    generation,
    matmul_tiles,
    multiprocessors,
    outer_tiles,
    tma_matmul_tiles,
    tma_outer_tiles,
)


@triton.jit(do_not_specialize=["M"])
def _matmul(
    # pointers
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    # sizes
    M,
    N,
    K,
    # strides, in elements
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    stride_ym,
    # constants
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, BAND)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        r, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        in_m, in_n = (m + r < M)[:, None], (n + c < N)[None, :]
        # Only the origin of a tile needs 64 bits.
        x_tile = x_ptr + m.to(tl.int64) * stride_xm + r[:, None] * stride_xm
        w_tile = w_ptr + n.to(tl.int64) * stride_wn + c[None, :] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            x_step = x_tile + tl.cast(start, tl.int64) * stride_xk + k[None, :] * stride_xk
            w_step = w_tile + tl.cast(start, tl.int64) * stride_wk + k[:, None] * stride_wk
            if EVEN_K:
                x, w = tl.load(x_step, mask=in_m, other=0.0), tl.load(w_step, mask=in_n, other=0.0)
            else:
                x = tl.load(x_step, mask=in_m & (start + k < K)[None, :], other=0.0)
                w = tl.load(w_step, mask=in_n & (start + k < K)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(b_ptr + n + c, mask=n + c < N, other=0.0).to(tl.float32)[None, :]
        y_tile = y_ptr + m.to(tl.int64) * stride_ym + n + r[:, None] * stride_ym + c[None, :]
        tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=in_m & in_n)


# Triton does not specialise on the alignment of acc, a weight's place in the gradient buffer, nor on the
# stride between shards: they differ from weight to weight.
@triton.jit(do_not_specialize=["stride_shard"], do_not_specialize_on_alignment=["acc_ptr"])
def _outer(
    # pointers
    acc_ptr,
    dy_ptr,
    x_ptr,
    shard_ptr,
    first_ptr,
    run_ptr,
    # sizes
    N,
    K,
    # strides, in elements
    stride_shard,
    stride_acc,
    stride_dy,
    stride_x,
    # constants
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n, k, part = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_K, tl.program_id(2)
    rn, rk, rt = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_T)
    dy_tile = dy_ptr + rt[:, None] * stride_dy + (n + rn)[None, :]
    x_tile = x_ptr + rt[:, None] * stride_x + (k + rk)[None, :]
    in_n, in_k = n + rn < N, k + rk < K
    inside = in_n[:, None] & in_k[None, :]
    acc_ptr += tl.load(shard_ptr + part).to(tl.int64) * stride_shard
    acc_tile = acc_ptr + n.to(tl.int64) * stride_acc + k + rn[:, None] * stride_acc + rk[None, :]
    acc = tl.load(acc_tile, mask=inside, other=0.0)
    for i in range(tl.load(first_ptr + part), tl.load(first_ptr + part + 1)):
        end = tl.load(run_ptr + 2 * i + 1)
        for t in range(tl.load(run_ptr + 2 * i), end, BLOCK_T):
            in_run = (t + rt < end)[:, None]
            dy = tl.load(dy_tile + tl.cast(t, tl.int64) * stride_dy, mask=in_run & in_n[None, :], other=0.0)
            x = tl.load(x_tile + tl.cast(t, tl.int64) * stride_x, mask=in_run & in_k[None, :], other=0.0)
            acc = tl.dot(tl.trans(dy), x, acc, input_precision="ieee")
    tl.store(acc_tile, acc, mask=inside)


def matmul(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    b_N: torch.Tensor | None = None,
    tiles: TileTable = DEFAULT_TABLE,
    rounded: bool = True,
    whole: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x w^T + b, rounded once to the dtype of x, or in fp32 where not `rounded`. -> [M, N].

    x and w may have any strides. whole: see tiles.matmul_tiles. The bits of a row depend on this row, w, b,
    `tiles` and `whole` only.
    """
    (M, K), N = x_MK.shape, w_NK.shape[0]
    y = x_MK.new_empty(M, N, dtype=x_MK.dtype if rounded else torch.float32)
    if not M:
        return y
    gpu, programs = generation(x_MK.device), multiprocessors(x_MK.device)
    tma = tma_matmul_tiles(M, N, K, x_MK.dtype, gpu, tiles, whole)
    transposed = w_NK.stride(1) == 1
    w = w_NK if transposed else w_NK.t()
    if rounded and tma and N * x_MK.itemsize % 16 == 0 and readable(x_MK, w):
        return matmul_tma(x_MK, w, b_N, transposed, tma, programs)
    t = matmul_tiles(M, N, K, x_MK.dtype, gpu, tiles, whole)
    if y.dtype != x_MK.dtype:  # a tile of fp32 results needs more registers, which spill on Blackwell
        t = t._replace(num_warps=2 * t.num_warps)
    launch(
        _matmul,
        (min(programs, ceil_div(M, t.block_m) * ceil_div(N, t.block_n)),),
        x_MK,
        w_NK,
        b_N,
        y,
        M,
        N,
        K,
        *x_MK.stride(),
        w_NK.stride(1),
        w_NK.stride(0),
        N,
        HAS_BIAS=b_N is not None,
        EVEN_K=K % t.block_k == 0,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        BAND=BAND,
        PROGRAMS=programs,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )
    return y


def add_outer(
    acc_SNK: torch.Tensor, dy_TN: torch.Tensor, x_TK: torch.Tensor, blocks: TokenBlocks, empty: bool = False
) -> None:
    """acc [shards, N, K] += dy^T x, block after block, all shards in one launch.

    acc is fp32 with contiguous rows; dy and x have one dtype. empty: the shards of `blocks` count as zeros in
    acc, whatever it holds.
    """
    dy, x = rows_contiguous(dy_TN), rows_contiguous(x_TK)
    assert acc_SNK.dtype == torch.float32, acc_SNK.dtype
    assert acc_SNK.stride(2) == 1, acc_SNK.stride()
    (N, K), gpu, runs = acc_SNK.shape[1:], generation(x.device), blocks.on(x.device).runs
    tma = tma_outer_tiles(N, K, x.dtype, gpu)
    if tma and outer_readable(acc_SNK, dy, x):
        return add_outer_tma(acc_SNK, dy, x, runs, tma, multiprocessors(x.device), empty)
    if empty:
        for shard in blocks.shards:
            acc_SNK[shard].zero_()
    add_runs(acc_SNK, dy, x, runs, outer_tiles(x.dtype, gpu))


def outer_readable(acc_SNK: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether TMA can read the operands of a weight gradient, and the sums."""
    return readable(acc_SNK[0], dy, x) and acc_SNK.stride(0) % 4 == 0


def add_runs(acc_SNK: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, runs: Runs, t: Tiles) -> None:
    """acc [places, N, K] += dy^T x over the runs of rows of each place, one run after another, without TMA.

    dy and x have contiguous rows.
    """
    N, K = acc_SNK.shape[1:]
    launch(
        _outer,
        (ceil_div(K, t.block_n), ceil_div(N, t.block_m), len(runs.places)),
        acc_SNK,
        dy,
        x,
        runs.places,
        runs.first,
        runs.rows,
        N,
        K,
        acc_SNK.stride(0),
        acc_SNK.stride(1),
        dy.stride(0),
        x.stride(0),
        BLOCK_N=t.block_m,
        BLOCK_K=t.block_n,
        BLOCK_T=t.block_k,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )
