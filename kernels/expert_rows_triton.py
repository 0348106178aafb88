"""The tables of a mixture of experts' rows on a GPU. Nothing waits for the device, and every shape is fixed.

Two launches sort the slots of the tokens by expert, and stably: a counting sort with one program for each
expert. The first counts the expert's slots. The second adds the counts of the experts before it, and writes
the expert's slots in ascending order. There are no atomics, and all numbers are integers.

The rows lie without padding: R = T k. A product walks them in row tiles, each of one expert. How many tiles
an expert has is known on the device only. So the table of the tiles is as long as it can ever have to be, and
tiles that are not there are empty. There is no capacity, and no token is dropped.

`sum_slots` adds the rows of a token with the arithmetic of vLLM's CUDA moe_sum (csrc/moe): slot after slot
from 0 in fp32, and one rounding.

Shapes: T tokens, k experts of a token, R rows, E experts. Slot t k + j is the j-th of token t.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch, next_power_of_2
from .tiles import grouped_rows

# Slots that a program reads at once, and its warps. They decide nothing.
CHUNK, WARPS = 1024, 4
# Columns of a program that adds slots or copies rows. They decide no bit: each element is a sum of its own.
TILE = 1024
# Sequences whose rows a program looks for at once.
SEQUENCES = 32


@triton.jit(do_not_specialize=["R"])
def _count_slots(id_ptr, count_ptr, R, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(0, R, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        total += (tl.load(id_ptr + slot, mask=slot < R, other=-1) == expert).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(total))


@triton.jit(do_not_specialize=["R", "tiles"])
def _sort_slots(
    # pointers
    id_ptr,
    count_ptr,
    slot_ptr,
    place_ptr,
    first_ptr,
    tile_ptr,
    # sizes
    R,
    E,
    tiles,
    # constants
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + experts, mask=experts < E, other=0)
    first = tl.sum(tl.where(experts < expert, counts, 0))
    end = first + tl.load(count_ptr + expert)
    tl.store(first_ptr + expert, first)
    tl.store(first_ptr + expert + 1, end)  # the next expert writes the same number
    row = first
    for start in range(0, R, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        is_own = tl.load(id_ptr + slot, mask=slot < R, other=-1) == expert
        rows = row + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(slot_ptr + rows, slot, mask=is_own)
        tl.store(place_ptr + slot, rows, mask=is_own)
        row += tl.sum(is_own.to(tl.int32))
    tile = tl.sum(tl.where(experts < expert, tl.cdiv(counts, BLOCK_M), 0))
    for start in range(first, end, BLOCK_M):
        _write_tile(tile_ptr, tile, expert, start, tl.minimum(start + BLOCK_M, end))
        tile += 1
    if expert == E - 1:
        for empty in range(tile, tiles):
            _write_tile(tile_ptr, empty, 0, 0, 0)


@triton.jit
def _write_tile(tile_ptr, tile, expert, start, end):
    tl.store(tile_ptr + 3 * tile, expert)
    tl.store(tile_ptr + 3 * tile + 1, start)
    tl.store(tile_ptr + 3 * tile + 2, end)


@triton.jit
def _sum_slots(x_ptr, place_ptr, y_ptr, N, K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for j in range(K):
        row = tl.load(place_ptr + token * K + j).to(tl.int64)
        total += tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _rows_of_tokens(
    x_ptr, q_ptr, slot_ptr, y_ptr, N, SLOTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slot_ptr + row)
    token = (slot // SLOTS).to(tl.int64)
    x = tl.load(x_ptr + token * N + cols, mask=cols < N, other=0.0)
    if HAS_WEIGHT:
        x = (x.to(tl.float32) * tl.load(q_ptr + slot)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * N + cols, x, mask=cols < N)


# The sequences are a part of those of a pass, and may begin at any address.
@triton.jit(do_not_specialize=["m", "steps"], do_not_specialize_on_alignment=["sequence_ptr"])
def _runs_of_experts(
    slot_ptr, first_ptr, sequence_ptr, run_ptr, m, steps, SLOTS: tl.constexpr, CHUNK: tl.constexpr
):
    """The first row of an expert whose token is not before a bound, by bisection: `steps` halve any rows."""
    expert = tl.program_id(0)
    first, end = tl.load(first_ptr + expert), tl.load(first_ptr + expert + 1)
    for start in range(0, m, CHUNK):
        sequence = start + tl.arange(0, CHUNK)
        for side in tl.static_range(2):
            bound = tl.load(sequence_ptr + 2 * sequence + side, mask=sequence < m, other=0)
            low, high = tl.zeros([CHUNK], tl.int32) + first, tl.zeros([CHUNK], tl.int32) + end
            for _ in range(steps):
                middle = (low + high) // 2
                token = tl.load(slot_ptr + middle, mask=low < high, other=0) // SLOTS
                is_before = (low < high) & (token < bound)
                high = tl.where((low < high) & (token >= bound), middle, high)
                low = tl.where(is_before, middle + 1, low)
            tl.store(run_ptr + 2 * (expert * m + sequence) + side, low, mask=sequence < m)


@dataclass(frozen=True)
class ExpertTables:
    """ExpertRows on a device: the rows that the tokens' experts make, as tables.

    shape: T and k. block_m: the most rows of a row tile.
    """

    experts: int
    shape: torch.Size
    block_m: int
    slots: torch.Tensor  # [R] int32, the slot of each row
    places: torch.Tensor  # [T, k] int32, the row of each slot
    first: torch.Tensor  # [E + 1] int32, the first row of each expert, and R
    tiles: torch.Tensor  # [n, 3] int32, the expert, the first row and the end of each row tile

    @classmethod
    def empty(cls, ids: torch.Tensor, experts: int) -> "ExpertTables":
        """Tables that nobody has filled, of the slots of ids [T, k]."""
        R, shape, device = ids.numel(), ids.shape, ids.device
        block_m = grouped_rows(R, experts)
        # An expert that has rows has at most one tile that is not full.
        tiles = R // block_m + min(R, experts)
        shapes = (R,), shape, (experts + 1,), (tiles, 3)
        tables = (torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)
        return cls(experts, shape, block_m, *tables)


def sort_slots(ids: torch.Tensor, experts: int) -> ExpertTables:
    """The tables of the rows that the experts ids [T, k] int64 make."""
    ids = ids.contiguous()
    tables, R = ExpertTables.empty(ids, experts), ids.numel()
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    launch(_count_slots, (experts,), ids, counts, R, CHUNK=CHUNK, num_warps=WARPS)
    launch(
        _sort_slots,
        (experts,),
        ids,
        counts,
        tables.slots,
        tables.places,
        tables.first,
        tables.tiles,
        R,
        experts,
        len(tables.tiles),
        BLOCK_M=tables.block_m,
        EXPERTS=next_power_of_2(experts),
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
    return tables


def sum_slots(x_RN: torch.Tensor, rows: ExpertTables) -> torch.Tensor:
    """The sum of each token's rows, [T, N] in the dtype of x."""
    (T, k), N = rows.shape, x_RN.shape[1]
    y = torch.empty(T, N, dtype=x_RN.dtype, device=x_RN.device)
    if T:
        launch(
            _sum_slots,
            (T, ceil_div(N, TILE)),
            dense(x_RN),
            rows.places,
            y,
            N,
            K=k,
            TILE=TILE,
            num_warps=WARPS,
        )
    return y


def rows_of_tokens(x_TN: torch.Tensor, rows: ExpertTables, q_Tk: torch.Tensor | None = None) -> torch.Tensor:
    """The rows [R, N] of the tokens' x [T, N], each times its slot's q, rounded to the dtype of x."""
    (R,), N = rows.slots.shape, x_TN.shape[1]
    y = torch.empty(R, N, dtype=x_TN.dtype, device=x_TN.device)
    if R:
        launch(
            _rows_of_tokens,
            (R, ceil_div(N, TILE)),
            dense(x_TN),
            q_Tk,
            rows.slots,
            y,
            N,
            SLOTS=rows.shape[1],
            HAS_WEIGHT=q_Tk is not None,
            TILE=TILE,
            num_warps=WARPS,
        )
    return y


def runs_of_experts(rows: ExpertTables, sequences: torch.Tensor) -> torch.Tensor:
    """The rows of each expert in each sequence, [E m, 2] int32: the first and the end.

    sequences [m, 2] int32: the first token and the end of each.
    """
    m = len(sequences)
    runs = torch.empty(rows.experts * m, 2, dtype=torch.int32, device=sequences.device)
    launch(
        _runs_of_experts,
        (rows.experts,),
        rows.slots,
        rows.first,
        sequences,
        runs,
        m,
        len(rows.slots).bit_length() + 1,
        SLOTS=rows.shape[1],
        CHUNK=SEQUENCES,
        num_warps=1,
    )
    return runs
