"""Matrix products on a GPU whose tiles travel through TMA: many rows, 16 bits, Hopper.

    y = x w^T + b        dx = dy w        dw += sum over token blocks of dy_b^T x_b

The bits are those of matmul_triton.py: the same BLOCK_K, one fp32 accumulator, ascending K; for dw the same
chunks of tokens in the same order. TMA, the size of a tile along M and N, and the order of the programs
decide no bit (tests/triton/test_matmul_tma.py; benchmarks/device.sh kernels). matmul_triton.py decides which
of the two kernels a product takes, and explains shapes and roundings.

TMA copies a box of a tensor into shared memory with one instruction. It fills what lies past the tensor's end
with zeros, and it needs rows at multiples of 16 bytes. `load_ragged` fills what lies past the end of a run of
tokens, too, so that no product reads a token of another block.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import ceil_div, launch
from .order import Runs
from .tiles import Tiles

# Row tiles that use the same column tiles while these lie in the L2 cache.
BAND = 8


@triton.jit
def tile_place(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of a tile: bands of BAND rows of tiles, column by column."""
    in_band = BAND * tiles_n
    first = tile // in_band * BAND
    height = min(tiles_m - first, BAND)
    return first + tile % in_band % height, tile % in_band // height


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of x [ROWS, 2 WIDTH]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def _beside(left, right, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 2 WIDTH] of two halves."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, 2 * WIDTH))


@triton.jit
def _quarters(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x [ROWS, 4 WIDTH] as four boxes. One wide box would take the shared memory of two stages."""
    left, right = _halves(x, ROWS, 2 * WIDTH)
    first, second = _halves(left, ROWS, WIDTH)
    third, fourth = _halves(right, ROWS, WIDTH)
    return first, second, third, fourth


@triton.jit
def _load_box(desc, shard, r, c, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A box of a shard's sums."""
    return tl.reshape(desc.load([shard, r, c]), (ROWS, WIDTH))


@triton.jit
def _load_boxes(desc, shard, r, c, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 4 WIDTH] as four boxes, straight into the layout of the accumulator."""
    first = _load_box(desc, shard, r, c, ROWS, WIDTH)
    left = _beside(first, _load_box(desc, shard, r, c + WIDTH, ROWS, WIDTH), ROWS, WIDTH)
    third = _load_box(desc, shard, r, c + 2 * WIDTH, ROWS, WIDTH)
    right = _beside(third, _load_box(desc, shard, r, c + 3 * WIDTH, ROWS, WIDTH), ROWS, WIDTH)
    return _beside(left, right, ROWS, 2 * WIDTH)


@triton.jit(do_not_specialize=["M"])
def _matmul_tma(
    x_desc,
    w_desc,
    y_desc,
    b_ptr,
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    finished = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = tile_place(tile, tiles_m, tiles_n, BAND)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            x = x_desc.load([m * BLOCK_M, k * BLOCK_K])
            if TRANSPOSED:
                w = w_desc.load([n * BLOCK_N, k * BLOCK_K]).T
            else:
                w = w_desc.load([k * BLOCK_K, n * BLOCK_N])
            acc = tl.dot(x, w, acc)
        # The place is computed again, so that the flattened loop carries none through the products.
        finished += PROGRAMS
        m, n = tile_place(finished, tiles_m, tiles_n, BAND)
        if HAS_BIAS:
            c = n * BLOCK_N + tl.arange(0, BLOCK_N)
            acc += tl.load(b_ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        first, second, third, fourth = _quarters(acc, BLOCK_M, BLOCK_N // 4)
        y_desc.store([m * BLOCK_M, n * BLOCK_N], first.to(y_desc.dtype))
        y_desc.store([m * BLOCK_M, n * BLOCK_N + BLOCK_N // 4], second.to(y_desc.dtype))
        y_desc.store([m * BLOCK_M, n * BLOCK_N + 2 * (BLOCK_N // 4)], third.to(y_desc.dtype))
        y_desc.store([m * BLOCK_M, n * BLOCK_N + 3 * (BLOCK_N // 4)], fourth.to(y_desc.dtype))


@triton.jit(do_not_specialize=["parts"])
def _outer_tma(
    # descriptors of TMA and pointers
    acc_desc,
    dy_desc,
    x_desc,
    shard_ptr,
    first_ptr,
    run_ptr,
    # sizes
    parts,
    N,
    K,
    # constants
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EMPTY: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_K // 4
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_k * parts, PROGRAMS):
        part = tile // (tiles_n * tiles_k)
        n, k = tile_place(tile % (tiles_n * tiles_k), tiles_n, tiles_k, BAND)
        shard, r, c = tl.load(shard_ptr + part), n * BLOCK_N, k * BLOCK_K
        if EMPTY:
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        else:
            acc = _load_boxes(acc_desc, shard, r, c, BLOCK_N, WIDTH)
        for i in range(tl.load(first_ptr + part), tl.load(first_ptr + part + 1)):
            start, end = tl.load(run_ptr + 2 * i), tl.load(run_ptr + 2 * i + 1)
            for t in range(0, end - start, BLOCK_T):
                dy = load_ragged(dy_desc, start, end - start, [t, r])
                x = load_ragged(x_desc, start, end - start, [t, c])
                acc = tl.dot(dy.T, x, acc)
        first, second, third, fourth = _quarters(acc, BLOCK_N, WIDTH)
        acc_desc.store([shard, r, c], tl.reshape(first, (1, BLOCK_N, WIDTH)))
        acc_desc.store([shard, r, c + WIDTH], tl.reshape(second, (1, BLOCK_N, WIDTH)))
        acc_desc.store([shard, r, c + 2 * WIDTH], tl.reshape(third, (1, BLOCK_N, WIDTH)))
        acc_desc.store([shard, r, c + 3 * WIDTH], tl.reshape(fourth, (1, BLOCK_N, WIDTH)))


def readable(*tensors: torch.Tensor) -> bool:
    """Whether TMA can read these matrices: contiguous rows, each at a multiple of 16 bytes, none on another.

    The rows of an expanded tensor lie on one another.
    """
    return all(
        x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) * x.itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
        and x.numel()
        for x in tensors
    )


def matmul_tma(
    x_MK: torch.Tensor, w: torch.Tensor, b_N: torch.Tensor | None, transposed: bool, t: Tiles, programs: int
) -> torch.Tensor:
    """x w^T + b for w [N, K] (`transposed`), or x w + b for w [K, N]. -> [M, N].

    Both are `readable`, and so is y: N is a multiple of 8. `programs`: how many run at once at most.
    """
    (M, K), N = x_MK.shape, w.shape[0 if transposed else 1]
    y = x_MK.new_empty(M, N)
    launch(
        _matmul_tma,
        (min(programs, ceil_div(M, t.block_m) * ceil_div(N, t.block_n)),),
        _boxes(x_MK, t.block_m, t.block_k),
        _boxes(w, t.block_n, t.block_k) if transposed else _boxes(w, t.block_k, t.block_n),
        _boxes(y, t.block_m, t.block_n // 4),
        b_N,
        M,
        N,
        K,
        TRANSPOSED=transposed,
        HAS_BIAS=b_N is not None,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        BAND=BAND,
        PROGRAMS=programs,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )
    return y


def add_outer_tma(
    acc_SNK: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    runs: Runs,
    t: Tiles,
    programs: int,
    empty: bool,
) -> None:
    """acc [places, N, K] += dy^T x over the runs of rows of each place, one run after another.

    empty: acc counts as zeros and is not read.
    """
    (_, N, K), parts = acc_SNK.shape, len(runs.places)
    shape, strides, box = list(acc_SNK.shape), list(acc_SNK.stride()), [1, t.block_m, t.block_n // 4]
    launch(
        _outer_tma,
        (min(programs, ceil_div(N, t.block_m) * ceil_div(K, t.block_n) * parts),),
        TensorDescriptor(acc_SNK, shape, strides, box),
        create_ragged_descriptor(dy_TN, [t.block_k, t.block_m]),
        create_ragged_descriptor(x_TK, [t.block_k, t.block_n]),
        runs.places,
        runs.first,
        runs.rows,
        parts,
        N,
        K,
        BLOCK_N=t.block_m,
        BLOCK_K=t.block_n,
        BLOCK_T=t.block_k,
        BAND=BAND,
        PROGRAMS=programs,
        EMPTY=empty,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _boxes(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that TMA reads or writes in boxes [rows, columns]."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])
