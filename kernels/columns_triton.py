"""Column sums in canonical order on a GPU: the gradient of a bias, and the end of that of a norm. No atomics.

    bias: acc += sum_t dy          norm: acc += sum_t dy x r

There are two passes. First, one program for each run of rows sums the run into a partial sum. For a bias this
is `_block_columns`, whose run is a token block. For a norm it is the backward kernel, whose runs are
NORM_ROWS rows of a block. Then `_add_partials` adds the partial sums to the gradient.

Shapes: dy [T, D]; partial [blocks * runs of a block, D] and acc [shards, D] in fp32.
Roundings: none but those of fp32 itself.
Order: the partial sums of a block are added to each other, and block after block is added to the gradient.
The blocks of a sequence are the same whatever the sequence is packed with. So the bits depend on the order of
the sequences only. One launch adds the blocks of all shards, each to the shard's sum, and those of several
weights where they wait for each other (grad.PendingSums).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch
from .order import TOKEN_BLOCK, TokenBlocks
from .partial_sums import PartialSums

# Columns of one program of _block_columns: 64 loads of 16 bits fill a cache line.
COLUMNS = 64
# Rows loaded at once: 16 rows of 64 columns are 8 elements for each of 128 threads. ROWS, COLUMNS and WARPS
# order the sum.
ROWS = 16
WARPS = 4
# Rows of one program of a norm's backward: enough to share a load of the weight, and few enough that 4,096
# tokens give every multiprocessor of an H100 work. They order the sum.
NORM_ROWS = 16
# Columns of one program of _add_partials, and the blocks whose loads are in flight together. Neither orders
# the sum.
SUM_COLUMNS, UNROLL = 32, 8
# Weights of one launch of _add_all_partials: two launches for the norms of the 0.6B.
WEIGHTS = 32


@triton.jit
def _block_columns(
    dy_ptr,
    table_ptr,
    partial_ptr,
    D,
    TOKEN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(table_ptr + 2 * block)
    end = tl.load(table_ptr + 2 * block + 1)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for i in range(0, TOKEN_BLOCK, ROWS):
        rows = (start + i + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < end)[:, None] & (cols < D)[None, :]
        acc += tl.load(dy_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(partial_ptr + block.to(tl.int64) * D + cols, tl.sum(acc, axis=0), mask=cols < D)


@triton.jit
def _add_runs(
    acc_ptr,
    partial_ptr,
    shard_ptr,
    first_ptr,
    acc_stride,
    D,
    RUNS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the partial sums of one shard to some columns. A thread holds whole columns."""
    cols, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    runs = tl.arange(0, RUNS)
    place = acc_ptr + tl.load(shard_ptr + part).to(tl.int64) * acc_stride + cols
    end = tl.load(first_ptr + part + 1)
    acc = tl.load(place, mask=cols < D, other=0.0)
    for first in range(tl.load(first_ptr + part), end, UNROLL):
        for i in tl.static_range(UNROLL):
            rows = ((first + i) * RUNS + runs).to(tl.int64)
            mask = (rows < end * RUNS)[:, None] & (cols < D)[None, :]
            # Zeros past the last block change no bit: a sum that begins at +0 is never -0.
            acc += tl.sum(
                tl.load(partial_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0), axis=0
            )
    tl.store(place, acc, mask=cols < D)


# Triton does not specialise on the place of acc, a weight in the gradient buffers, nor on that of partial. So
# one binary serves all, and a block's runs are added in ascending order.
@triton.jit(do_not_specialize=["acc_stride"], do_not_specialize_on_alignment=["acc_ptr", "partial_ptr"])
def _add_partials(
    acc_ptr,
    partial_ptr,
    shard_ptr,
    first_ptr,
    acc_stride,
    D,
    RUNS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _add_runs(acc_ptr, partial_ptr, shard_ptr, first_ptr, acc_stride, D, RUNS, UNROLL, COLUMNS)


@triton.jit
def _pick(pointers, which, N: tl.constexpr):
    """pointers[which]. An address as a number is aligned to nothing, which is what _add_partials assumes."""
    address = pointers[0].to(tl.int64)
    for i in tl.static_range(1, N):
        address = tl.where(which == i, pointers[i].to(tl.int64), address)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["acc_stride"])
def _add_all_partials(
    acc_ptrs,
    partial_ptrs,
    shard_ptr,
    first_ptr,
    acc_stride,
    D,
    RUNS: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """_add_partials for several weights, one after another along the grid's third axis."""
    acc_ptr = _pick(acc_ptrs, tl.program_id(2), WEIGHTS)
    partial_ptr = _pick(partial_ptrs, tl.program_id(2), WEIGHTS)
    _add_runs(acc_ptr, partial_ptr, shard_ptr, first_ptr, acc_stride, D, RUNS, UNROLL, COLUMNS)


def add_partials(acc_SD: torch.Tensor, partial: torch.Tensor, blocks: TokenBlocks, rows: int) -> None:
    """acc [shards, D] += the partial sums of each block, in the order of the blocks.

    partial [blocks * TOKEN_BLOCK / rows, D] in fp32: of each piece of `rows` rows (order.BlockTables).
    """
    D, tables = partial.shape[1], blocks.on(partial.device)
    launch(
        _add_partials,
        (ceil_div(D, SUM_COLUMNS), len(blocks.shards)),
        acc_SD,
        partial,
        tables.shards,
        tables.first,
        acc_SD.stride(0),
        D,
        RUNS=TOKEN_BLOCK // rows,
        UNROLL=UNROLL,
        COLUMNS=SUM_COLUMNS,
        num_warps=1,
    )


def add_all_partials(waiting: Sequence[PartialSums]) -> None:
    """add_partials for sums of different weights, those that are alike in launches of up to WEIGHTS."""
    alike: dict[tuple[Any, ...], list[PartialSums]] = {}
    for one in waiting:
        kind = (one.partial.shape, one.sums.stride(0), one.rows, one.blocks)
        alike.setdefault(kind, []).append(one)
    for group in alike.values():
        for start in range(0, len(group), WEIGHTS):
            _add_group(group[start : start + WEIGHTS])


def _add_group(group: Sequence[PartialSums]) -> None:
    """Partial sums of one shape over the same blocks, at most WEIGHTS of them."""
    acc, partial, blocks, rows = group[0]
    if len(group) == 1:
        return add_partials(acc, partial, blocks, rows)
    D, tables = partial.shape[1], blocks.on(partial.device)
    filled = [*group, *[group[0]] * (WEIGHTS - len(group))]  # one number of pointers is one binary
    launch(
        _add_all_partials,
        (ceil_div(D, SUM_COLUMNS), len(blocks.shards), len(group)),
        tuple(one.sums for one in filled),
        tuple(one.partial for one in filled),
        tables.shards,
        tables.first,
        acc.stride(0),
        D,
        RUNS=TOKEN_BLOCK // rows,
        UNROLL=UNROLL,
        COLUMNS=SUM_COLUMNS,
        WEIGHTS=WEIGHTS,
        num_warps=1,
    )


def bias_columns(dy_TN: torch.Tensor, blocks: TokenBlocks) -> torch.Tensor:
    """The column sums of each block of dy [T, N], [blocks, N] in fp32."""
    dy, N, table = dense(dy_TN), dy_TN.shape[1], blocks.on(dy_TN.device).rows
    partial = torch.empty(len(table), N, dtype=torch.float32, device=dy.device)
    launch(
        _block_columns,
        (len(table), ceil_div(N, COLUMNS)),
        dy,
        table,
        partial,
        N,
        TOKEN_BLOCK=TOKEN_BLOCK,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return partial
