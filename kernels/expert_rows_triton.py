"""The tables of a mixture of experts' rows on a GPU. Nothing waits for the device, and every shape is fixed.

Two launches sort the slots of the tokens by expert, and stably: a counting sort with one program for each
expert. The first counts the expert's slots. The second adds the counts of the experts before it, and writes
the expert's slots in ascending order. There are no atomics, and all numbers are integers.

The rows lie without padding: R = T k. A product walks them in row tiles, each of one expert. How many tiles
an expert has is known on the device only. So the table of the tiles is as long as it can ever have to be, and
tiles that are not there are empty. There is no capacity, and no token is dropped.

Shapes: T tokens, k experts of a token, R rows, E experts. Slot t k + j is the j-th of token t.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import launch, next_power_of_2
from .tiles import grouped_rows

# Slots that a program reads at once, and its warps. They decide nothing.
CHUNK, WARPS = 1024, 4


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


@dataclass(frozen=True)
class ExpertTables:
    """See expert_rows.ExpertRows: the rows that the tokens' experts make, as tables on a device.

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
    def empty(cls, shape: torch.Size, experts: int, device: torch.device) -> "ExpertTables":
        """Tables that nobody has filled."""
        R = shape.numel()
        block_m = grouped_rows(R, experts)
        # An expert that has rows has at most one tile that is not full.
        tiles = R // block_m + min(R, experts)
        shapes = (R,), shape, (experts + 1,), (tiles, 3)
        tables = (torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)
        return cls(experts, shape, block_m, *tables)


def sort_slots(ids: torch.Tensor, experts: int) -> ExpertTables:
    """The tables of the rows that the experts ids [T, k] int64 make."""
    tables, R, ids = ExpertTables.empty(ids.shape, experts, ids.device), ids.numel(), ids.contiguous()
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
