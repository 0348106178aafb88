"""The gradients of LoRA adapters of the experts' matrices on a GPU (low_rank.py).

    db_e += sum over the rows r of expert e of dy_r^T (s x_r a_e^T)
    da_e += sum over the rows r of expert e of (s dy_r b_e)^T x_r

The adapters of all experts are one product: they lie at equal distances in the memory of the adapters, and so
do their gradients. So they are views [E, ...], and the kernels are those of grouped_linear_triton.py.

Shapes: x [R, K]; dy [R, N] with the columns of one or more matrices [n, K] of each expert; b [E, n, r]; a
[E, r, K]; R rows (expert_rows_triton.py), E experts, r the rank.
Roundings: x and dy are exact in fp32. x a^T and dy b are sums in fp32, which the product with s rounds once
more. da and db are sums in fp32.
Order: a row of x a^T or of dy b has the order of grouped_matmul, and knows no other row. da and db are summed
as the experts' weight gradients are, sequence after sequence.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from .expert_rows_triton import ExpertTables, runs_of_experts
from .grad import GradBuffer
from .grouped_linear_triton import add_expert_runs, grouped_matmul
from .low_rank import LowRankBuffers, by_matrix, stacked, stacked_factors
from .order import Runs, TokenBlocks


def add_grouped_low_rank(
    buffers: LowRankBuffers, dy_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertTables, blocks: TokenBlocks
) -> None:
    """Add the gradients of the adapters of every expert, sequence after sequence of `blocks`."""
    if not blocks.shards:
        return
    x, width = x_RK.float(), dy_RN.shape[1]
    runs = _runs_of_shards(rows, blocks)
    for first, adapters in by_matrix(buffers.adapters, width, rows.experts).items():
        b, a = stacked_factors(adapters, torch.float32)
        dy = dy_RN[:, first : first + b.shape[1]].float().contiguous()
        x_a = grouped_matmul(x, a, rows, x_of_tokens=False).mul_(adapters[0].scale)
        dy_b = grouped_matmul(dy, b.transpose(1, 2), rows, x_of_tokens=False).mul_(adapters[0].scale)
        _add([adapter.db for adapter in adapters], dy, x_a, runs, blocks)
        _add([adapter.da for adapter in adapters], dy_b, x, runs, blocks)


def _runs_of_shards(rows: ExpertTables, blocks: TokenBlocks) -> list[tuple[int, Runs]]:
    """Of each virtual shard the runs of each expert's rows."""
    sequences = blocks.on(rows.slots.device).sequences
    places = torch.arange(rows.experts + 1, dtype=torch.int32, device=rows.slots.device)
    return [
        (shard, Runs(places[: rows.experts], places * (b - a), runs_of_experts(rows, sequences[a:b])))
        for shard, (a, b) in zip(blocks.shards, pairwise(blocks.first_sequence.tolist()), strict=True)
    ]


def _add(
    buffers: Sequence[GradBuffer],
    dy: torch.Tensor,
    x: torch.Tensor,
    runs: Sequence[tuple[int, Runs]],
    blocks: TokenBlocks,
) -> None:
    """buffers[e] [shards, N, K] += dy^T x of each expert's rows."""
    for buffer in buffers:
        buffer.zeroed(blocks.shards)
    for shard, by_expert in runs:
        sums = stacked([buffer.sums[shard] for buffer in buffers])
        _, N, K = sums.shape
        padded = sums
        if (dy.shape[1], x.shape[1]) != (N, K):
            padded = F.pad(sums, (0, x.shape[1] - K, 0, dy.shape[1] - N))
        add_expert_runs(padded, dy, x, by_expert, False)
        if padded is not sums:
            sums.copy_(padded[:, :N, :K])
