"""The gradient of the experts' biases on a GPU: column sums of each expert's rows.

    db_e += sum over the rows r of e of dy_r

Shapes: dy [R, N]; db [E, N] in fp32. The rows are those of expert_rows_triton.py.
Roundings: none but the accumulator's own.
Order: one program owns some columns of an expert. It goes on in the sum so far, sequence after sequence, in
tiles of ROWS rows, each summed by a tree. No tile has rows of two sequences.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl

from .expert_rows_triton import ExpertTables, runs_of_experts
from .grad import GradBuffer
from .launch import ceil_div, dense, launch
from .order import TokenBlocks

# Rows and columns of a tile, and warps. They order the sum, so they are constants.
ROWS, COLUMNS, WARPS = 32, 64, 4


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["sum_ptr"])
def _add_expert_columns(sum_ptr, dy_ptr, run_ptr, sequences, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert = tl.program_id(0)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = sum_ptr + expert.to(tl.int64) * N + cols
    acc = tl.load(place, mask=cols < N, other=0.0)
    for s in range(sequences):
        run = run_ptr + 2 * (expert * sequences + s)
        end = tl.load(run + 1)
        for start in range(tl.load(run), end, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < end)[:, None] & (cols < N)[None, :]
            dy = tl.load(dy_ptr + row.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
            acc += tl.sum(dy.to(tl.float32), axis=0)
    tl.store(place, acc, mask=cols < N)


def add_expert_columns(
    buffer: GradBuffer, dy_RN: torch.Tensor, rows: ExpertTables, blocks: TokenBlocks
) -> None:
    """buffer [shards, E, N] += the column sums of each expert's rows, sequence after sequence of `blocks`."""
    sums, dy, (E, N) = buffer.zeroed(blocks.shards), dense(dy_RN), (rows.experts, dy_RN.shape[1])
    sequences = blocks.on(dy.device).sequences
    for shard, (a, b) in zip(blocks.shards, pairwise(blocks.first_sequence.tolist()), strict=True):
        launch(
            _add_expert_columns,
            (E, ceil_div(N, COLUMNS)),
            sums[shard],
            dy,
            runs_of_experts(rows, sequences[a:b]),
            b - a,
            N,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
