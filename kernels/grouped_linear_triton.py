"""Products of rows with the matrices of their experts on a GPU.

    y_r = x_r w_e^T + b_e,  or q_r (x_r w_e^T + b_e)      of a row r of expert e; b where there is one
    dw_e += sum over the rows r of e of dy_r^T x_r

Shapes: x [T, K], a row for each token, or x [R, K]; w [E, N, K], a view with any strides; q [T, k] in fp32;
y [R, N]. The rows are those of expert_rows_triton.py.
Roundings: y is rounded once, after the bias was added to the fp32 sum, and the product with q. fp32
operands are multiplied as they are (ieee), never rounded to tf32.
Order: a program walks tiles of BLOCK_K along K in ascending order, with one fp32 accumulator. This is the
arithmetic of vLLM's fused_moe_kernel in batch-invariant mode, where BLOCK_K is 32 (get_default_config). A row
tile holds rows of one expert, and no row knows the others: a row has the same bits in any tile. dw is summed
by the kernels of matmul_triton.py, in tiles of 32 rows (16 in fp32). No tile has rows of two sequences.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl

from .expert_rows_triton import ExpertTables, runs_of_experts
from .grad import GradBuffer
from .launch import ceil_div, dense, launch, rows_contiguous
from .matmul_tma_triton import BAND, add_outer_tma, tile_place
from .matmul_triton import add_runs, outer_readable
from .order import Runs, TokenBlocks
from .tiles import generation, grouped_outer_tiles, grouped_tiles, multiprocessors


@triton.jit(do_not_specialize=["tiles"])
def _grouped_matmul(
    # pointers
    x_ptr,
    w_ptr,
    b_ptr,
    q_ptr,
    y_ptr,
    slot_ptr,
    tile_ptr,
    # sizes
    tiles,
    N,
    K,
    # strides, in elements
    stride_xm,
    stride_we,
    stride_wk,
    stride_wn,
    # constants
    SLOTS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """SLOTS: the slots of a token, whose rows are all x's row of the token; 0: x has a row for each row."""
    tile, tile_n = tile_place(tl.program_id(0), tiles, tl.cdiv(N, BLOCK_N), BAND)
    expert = tl.load(tile_ptr + 3 * tile).to(tl.int64)
    start, end = tl.load(tile_ptr + 3 * tile + 1), tl.load(tile_ptr + 3 * tile + 2)
    if start == end:
        return
    rows, n, k = start + tl.arange(0, BLOCK_M), tile_n * BLOCK_N, tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_N)
    in_m, in_n = (rows < end)[:, None], (n + c < N)[None, :]
    slots = tl.load(slot_ptr + rows, mask=rows < end, other=0)
    x_rows = (slots // SLOTS if SLOTS else rows).to(tl.int64)
    x_tile = x_ptr + x_rows[:, None] * stride_xm
    w_tile = w_ptr + expert * stride_we + n.to(tl.int64) * stride_wn + c[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, K, BLOCK_K):
        x_step = x_tile + step + k[None, :]
        w_step = w_tile + tl.cast(step, tl.int64) * stride_wk + k[:, None] * stride_wk
        if EVEN_K:
            x, w = tl.load(x_step, mask=in_m, other=0.0), tl.load(w_step, mask=in_n, other=0.0)
        else:
            x = tl.load(x_step, mask=in_m & (step + k < K)[None, :], other=0.0)
            w = tl.load(w_step, mask=in_n & (step + k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if b_ptr is not None:
        acc += tl.load(b_ptr + expert * N + n + c, mask=n + c < N, other=0.0).to(tl.float32)[None, :]
    if HAS_WEIGHT:
        acc *= tl.load(q_ptr + slots, mask=rows < end, other=0.0)[:, None]
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * N + n + c[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=in_m & in_n)


def grouped_matmul(
    x: torch.Tensor,
    w_ENK: torch.Tensor,
    rows: ExpertTables,
    x_of_tokens: bool,
    q_Tk: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row times the matrix of its expert, transposed, plus its bias of b [E, N], and times q. -> [R, N].

    x_of_tokens: x is [T, K], and a row takes its token's; otherwise x is [R, K]. dtype: of the result, None
    is that of x.
    """
    (_, N, K), R = w_ENK.shape, rows.shape.numel()
    y = torch.empty(R, N, dtype=dtype or x.dtype, device=x.device)
    if not R:
        return y
    x = rows_contiguous(x)
    t, tiles = grouped_tiles(rows.block_m, x.dtype, generation(x.device)), len(rows.tiles)
    launch(
        _grouped_matmul,
        (tiles * ceil_div(N, t.block_n),),
        x,
        w_ENK,
        None if b is None else dense(b),
        q_Tk,
        y,
        rows.slots,
        rows.tiles,
        tiles,
        N,
        K,
        x.stride(0),
        w_ENK.stride(0),
        w_ENK.stride(2),
        w_ENK.stride(1),
        SLOTS=rows.shape[1] if x_of_tokens else 0,
        HAS_WEIGHT=q_Tk is not None,
        EVEN_K=K % t.block_k == 0,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        BLOCK_K=t.block_k,
        BAND=BAND,
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )
    return y


def add_grouped_outer(
    buffer: GradBuffer, dy_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertTables, blocks: TokenBlocks
) -> None:
    """buffer [shards, E N, K] += dy^T x of each expert's rows, sequence after sequence of `blocks`.

    Or buffer [shards, E, K, N] += x^T dy, where the matrices lie transposed.
    One launch for each shard, whose expert is the place of a sum.
    """
    if not blocks.shards:
        return
    empty, sums, E = buffer.begin(blocks), buffer.sums, rows.experts
    left, right = map(rows_contiguous, (x_RK, dy_RN) if sums.dim() == 4 else (dy_RN, x_RK))
    sequences = blocks.on(x_RK.device).sequences
    places = torch.arange(E + 1, dtype=torch.int32, device=x_RK.device)
    for shard, (a, b) in zip(blocks.shards, pairwise(blocks.first_sequence.tolist()), strict=True):
        runs = Runs(places[:E], places * (b - a), runs_of_experts(rows, sequences[a:b]))
        add_expert_runs(sums[shard].view(E, -1, right.shape[1]), left, right, runs, empty)


def add_expert_runs(
    acc_ENK: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, runs: Runs, empty: bool
) -> None:
    """acc [E, N, K] += dy^T x over the runs of rows of each expert. empty: acc counts as zeros."""
    t, tma = grouped_outer_tiles(*acc_ENK.shape[1:], x.dtype, generation(x.device))
    if tma and outer_readable(acc_ENK, dy, x):
        return add_outer_tma(acc_ENK, dy, x, runs, tma, multiprocessors(x.device), empty)
    if empty:
        acc_ENK.zero_()
    add_runs(acc_ENK, dy, x, runs, t)
