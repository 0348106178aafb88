"""Triton kernels of draw.py: three launches, in which several programs share the tiles of a row.

Few rows are drawn from at a time, and one program for each would leave a GPU idle.

1. `_row_max`: the largest logit of a part of a row.
2. `_tile_sums`: for each tile, the sum of exp(z - max) for the logp, and the sum of the integers that stand
   for exp(z - max) in the draw.
3. `_pick`: the tile and the column at which the distribution function exceeds u; and the logp.

Roundings: none is left to the order of programs. A maximum is exact. The integers are those of
logprob_triton.prefix_sums, and their sums are exact. exp is torch's there (CUDA's expf).
Order: the sum of exp over tiles of TILE logits, added in ascending order by one program: the order of
logprob_triton._logprob_fwd, which has one program for a row. `max_contiguous` gives 16-bit logits the layout
of fp32 ones, four neighbours to a thread. Without it the sums of 154 of 1024 rows had other bits on an H100.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .launch import ceil_div, dense, launch, next_power_of_2
from .logprob_triton import TILE, WARPS, over

# Programs that share a row, and columns that one of them reads at once for the maximum. They decide no bit.
SPLITS, MAX_TILE = 8, 4096


@triton.jit
def _row_max(logits_ptr, max_ptr, V, SPLITS: tl.constexpr, TILE: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.cdiv(tl.cdiv(V, TILE), SPLITS) * TILE
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(split * columns, min(V, (split + 1) * columns), TILE):
        cols = start + tl.arange(0, TILE)
        z = tl.load(logits_ptr + row * V + cols, mask=cols < V, other=float("-inf"))
        largest = tl.maximum(largest, z.to(tl.float32))
    tl.store(max_ptr + row * SPLITS + split, tl.max(largest))


@triton.jit
def _largest(max_ptr, row, temperature, SPLITS: tl.constexpr, DIVIDE: tl.constexpr):
    """The row's largest z. The division keeps the order of the logits."""
    largest = tl.max(tl.load(max_ptr + row * SPLITS + tl.arange(0, SPLITS)))
    return over(largest, temperature, DIVIDE)


@triton.jit
def _scaled(logits_ptr, offset, mask, temperature, DIVIDE: tl.constexpr):
    """z of the logits at `offset`."""
    z = tl.load(logits_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return over(z, temperature, DIVIDE)


@triton.jit
def _tile_sums(
    logits_ptr,
    max_ptr,
    sum_ptr,
    count_ptr,
    V,
    tiles,
    temperature,
    units,
    SPLITS: tl.constexpr,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = _largest(max_ptr, row, temperature, SPLITS, DIVIDE)
    share = tl.cdiv(tiles, SPLITS)
    for tile in range(split * share, min(tiles, (split + 1) * share)):
        cols = tile * TILE + tl.max_contiguous(tl.arange(0, TILE), 4)
        mask = cols < V
        shifted = _scaled(logits_ptr, row * V + cols, mask, temperature, DIVIDE) - largest
        tl.store(sum_ptr + row * tiles + tile, tl.sum(tl.where(mask, tl.exp(shifted), 0.0)))
        count = (expf(shifted).to(tl.float64) * units).to(tl.int64)
        tl.store(count_ptr + row * tiles + tile, tl.sum(tl.where(mask, count, 0)))


@triton.jit
def _pick(
    # pointers
    logits_ptr,
    max_ptr,
    sum_ptr,
    count_ptr,
    u_ptr,
    id_ptr,
    logp_ptr,
    # sizes and scales
    V,
    tiles,
    temperature,
    units,
    # constants
    SPLITS: tl.constexpr,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = _largest(max_ptr, row, temperature, SPLITS, DIVIDE)
    t = tl.arange(0, TILES)
    counts = tl.load(count_ptr + row * tiles + t, mask=t < tiles, other=0)
    total = tl.sum(counts).to(tl.float64)
    below_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # nextafter(total, 0)
    target = tl.minimum(tl.load(u_ptr + row) * total, below_total)
    tile = tl.minimum(tl.sum((tl.cumsum(counts, 0).to(tl.float64) <= target).to(tl.int32)), tiles - 1)
    before = tl.sum(tl.where(t < tile, counts, 0))
    cols = tile * TILE + tl.arange(0, TILE)
    mask = cols < V
    shifted = _scaled(logits_ptr, row * V + cols, mask, temperature, DIVIDE) - largest
    count = tl.where(mask, (expf(shifted).to(tl.float64) * units).to(tl.int64), 0)
    distribution = (before + tl.cumsum(count, 0)).to(tl.float64)
    # Not-a-number logits would give an id out of bounds; their logp is NaN, which the host finds.
    token = tl.minimum(tile * TILE + tl.sum((distribution <= target).to(tl.int32)), V - 1)
    tl.store(id_ptr + row, token.to(tl.int64))
    sum_of_exp = 0.0
    for i in range(tiles):
        sum_of_exp += tl.load(sum_ptr + row * tiles + i)
    z = _scaled(logits_ptr, row * V + token, True, temperature, DIVIDE)
    tl.store(logp_ptr + row, z - largest - tl.log(sum_of_exp))


def draw_tokens(
    logits: torch.Tensor, u: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of draw.draw_tokens. logits [n, V], u [n] -> ids [n], logp [n]."""
    logits, (n, V), device = dense(logits), logits.shape, logits.device
    tiles = ceil_div(V, TILE)
    largest = torch.empty(n, SPLITS, dtype=torch.float32, device=device)
    sums = torch.empty(n, tiles, dtype=torch.float32, device=device)
    counts = torch.empty(n, tiles, dtype=torch.int64, device=device)
    ids = torch.empty(n, dtype=torch.int64, device=device)
    logp = torch.empty(n, dtype=torch.float32, device=device)
    units = 2.0 ** (62 - (V - 1).bit_length())  # as logprob_triton.prefix_sums
    numbers = (V, tiles, float(temperature), units)
    constants = dict(SPLITS=SPLITS, DIVIDE=temperature != 1.0, TILE=TILE, num_warps=WARPS)
    launch(_row_max, (n, SPLITS), logits, largest, V, SPLITS=SPLITS, TILE=MAX_TILE, num_warps=WARPS)
    launch(_tile_sums, (n, SPLITS), logits, largest, sums, counts, *numbers, **constants)
    launch(
        _pick,
        (n,),
        logits,
        largest,
        sums,
        counts,
        u,
        ids,
        logp,
        *numbers,
        TILES=next_power_of_2(tiles),
        **constants,
    )
    return ids, logp
