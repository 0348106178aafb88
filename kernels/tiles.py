"""Tile sizes of the matrix products on a GPU. Nothing is timed at run time.

BLOCK_K is the tile along the reduced dimension. It comes from a committed table (tile_tables.py), which every
product is given. Tiles along M and N are free, with one exception: BLOCK_M is never below 64. On Hopper and
later a tile of fewer than 64 rows uses another tensor-core instruction (mma.sync) than a larger tile (wgmma,
tcgen05).

The tiles of Hopper were chosen by prototypes on an H100 with the same bits: bf16, from a cold L2 cache, in
parts of cuBLAS's rate. 128 x 256 through TMA: 0.96 to 0.99 with 4,096 rows (128 x 128 with BLOCK_K = 64:
below 0.7; with 128: 0.86). Decoding 64 rows: narrow column tiles, so that every multiprocessor reads weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch

from .backend import INTERPRETED
from .tile_tables import TileTable

# BLOCK_K of the shapes that no table lists, by the size of the dtype.
_16_BIT, _32_BIT = 64, 32
# BLOCK_K of the grouped products of experts, and tokens of a tile of their weight gradients in 16 bits.
_GROUPED = 32
# Shared memory in bytes that one program may fill with tiles in flight: a little less than a multiprocessor
# has.
_SHARED_BYTES = {
    "ada": 96 << 10,
    "sm120": 96 << 10,
    "hopper": 208 << 10,
    "blackwell": 208 << 10,
    "ampere": 156 << 10,
    "amd": 60 << 10,
}
# Tiles in flight at most.
_STAGES = {torch.float32: 3, torch.bfloat16: 4, torch.float16: 4}


# Hopper's products in 16 bits. Below so many tiles of 128 x 256 (half of its 132 multiprocessors), smaller
# tiles without TMA keep more of them busy.
_TMA_MIN_TILES = 66


class Tiles(NamedTuple):
    """One launch configuration of a matrix product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def generation_of(capability: tuple[int, int] | None) -> str:
    """The generation in the tables of a CUDA compute capability; None is an AMD GPU."""
    if capability is None:
        return "amd"
    if capability == (8, 9):
        return "ada"
    return {12: "sm120", 10: "blackwell", 9: "hopper"}.get(capability[0], "ampere")


# The generation for which launches are recorded (kernels/compiled_cases.py); None outside `tiles_of_target`.
_target_generation: ContextVar[str | None] = ContextVar("target_generation", default=None)


@contextmanager
def tiles_of_target(target: str) -> Iterator[None]:
    """Use the tiles of an ahead-of-time target inside this context: sm_80, sm_90, sm_100 or gfx942."""
    capability = (int(target[3:-1]), int(target[-1])) if target.startswith("sm_") else None
    token = _target_generation.set(generation_of(capability))
    try:
        yield
    finally:
        _target_generation.reset(token)


def generation(device: torch.device) -> str:
    """The generation of the GPU `device`. Interpreted kernels take the tiles of Hopper."""
    return _target_generation.get() or _gpu_properties(device)[0]


def multiprocessors(device: torch.device) -> int:
    """The number of programs that run at once. It decides no bit."""
    return 132 if _target_generation.get() else _gpu_properties(device)[1]


@lru_cache(maxsize=16)
def _gpu_properties(device: torch.device) -> tuple[str, int]:
    """Generation and number of multiprocessors."""
    if INTERPRETED and device.type == "cpu":
        return "hopper", 4
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return generation_of(capability), torch.cuda.get_device_properties(device).multi_processor_count


def block_k(N: int, K: int, dtype: torch.dtype, gpu: str, table: TileTable) -> int:
    """The tile along K of x [M, K] w [N, K]^T on a GPU of generation `gpu`."""
    if dtype == torch.float32:
        return _32_BIT
    tuned = table.block_k(N, K, gpu) if dtype == torch.bfloat16 else None
    return tuned or _16_BIT


def matmul_tiles(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    gpu: str,
    table: TileTable,
    whole: tuple[int, int] | None = None,
) -> Tiles:
    """The configuration of x [M, K] w [N, K]^T on a GPU of generation `gpu`.

    whole: N and K of the weight of which ranks share parts; None where w is all of it.
    """
    bk = block_k(*(whole or (N, K)), dtype, gpu, table)
    if dtype == torch.float32:
        return _fitting_tiles(64, 64, bk, dtype, gpu)
    if M <= 64 and gpu == "hopper":
        bn = 64 if N >= 6144 else 32 if N >= 4096 else 16
        # As many bytes of weights and rows in flight as five tiles with BLOCK_K = 128 have.
        return Tiles(64, bn, bk, 4, 5 * 128 // bk)
    return _fitting_tiles(64 if M <= 64 else 128, 128, bk, dtype, gpu)


def grouped_rows(rows: int, experts: int) -> int:
    """The rows of a row tile of a grouped product of so many rows: vLLM's 64, or 128 where they fill them."""
    return 128 if rows >= 128 * experts else 64


def grouped_tiles(block_m: int, dtype: torch.dtype, gpu: str) -> Tiles:
    """The configuration of a grouped product (grouped_linear_triton.py). block_m: see grouped_rows.

    vLLM's batch-invariant mode has 64 x 64 tiles and this BLOCK_K for every dtype.
    """
    if dtype == torch.float32:
        return _fitting_tiles(block_m, 32, _GROUPED, dtype, gpu)  # 64 columns spill
    t = _fitting_tiles(block_m, block_m, _GROUPED, dtype, gpu)
    return t._replace(num_warps=8) if gpu == "blackwell" else t  # four warps spill there


def through_tma(dtype: torch.dtype, gpu: str) -> bool:
    """Whether products and attention go through TMA: in 16 bits, on Hopper."""
    return gpu == "hopper" and dtype.itemsize == 2


def tma_matmul_tiles(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    gpu: str,
    table: TileTable,
    whole: tuple[int, int] | None = None,
) -> Tiles | None:
    """The configuration through TMA, or None where the other kernel serves. whole: see matmul_tiles."""
    if not through_tma(dtype, gpu) or -(-M // 128) * -(-N // 256) < _TMA_MIN_TILES:
        return None
    bk = block_k(*(whole or (N, K)), dtype, gpu, table)
    # Four tiles of 128 x 256 with BLOCK_K = 128 do not fit in shared memory.
    return Tiles(128, 256, bk, 8, 4) if bk == 64 else Tiles(128, 128, bk, 8, 3)


def outer_tiles(dtype: torch.dtype, gpu: str) -> Tiles:
    """The configuration of a weight gradient on a GPU of generation `gpu`.

    block_m is along N, block_n along K, and block_k along the tokens. block_k orders the sum.
    """
    if dtype == torch.float32:
        return Tiles(64, 64, 16, 4, 3)  # registers spill with longer tiles
    if gpu in ("hopper", "blackwell"):
        return _fitting_tiles(128, 128, _16_BIT, dtype, gpu)
    # The accumulators of the other GPUs lie in registers, where 128 x 128 spills.
    return _fitting_tiles(128, 64, _16_BIT, dtype, gpu)._replace(num_warps=8)


def grouped_outer_tiles(N: int, K: int, dtype: torch.dtype, gpu: str) -> tuple[Tiles, Tiles | None]:
    """The configurations of the experts' weight gradients, [N, K] each: without TMA, and with it.

    block_k orders the sum. An expert has few rows of a sequence, and longer tiles would hold more padding.
    """
    if dtype == torch.float32:
        return outer_tiles(dtype, gpu), None
    tma = tma_outer_tiles(N, K, dtype, gpu)
    return outer_tiles(dtype, gpu)._replace(block_k=_GROUPED), tma and tma._replace(block_k=_GROUPED)


def tma_outer_tiles(N: int, K: int, dtype: torch.dtype, gpu: str) -> Tiles | None:
    """The configuration of a weight gradient through TMA, or None where the other kernel serves.

    block_m is along N, block_n along K, and block_k along the tokens, as in outer_tiles. Where tiles of 128 x
    256 are few (gate_up and o of the 0.6B), tiles of 64 x 256 are faster.
    """
    if not through_tma(dtype, gpu):
        return None
    tiles = -(-N // 128) * -(-K // 256)
    uneven = 132 < tiles < 2 * 132 or tiles < 66  # a second round of few programs, or too few for one
    return Tiles(64, 256, _16_BIT, 4, 4) if uneven else Tiles(128, 256, _16_BIT, 8, 3)


def _fitting_tiles(bm: int, bn: int, bk: int, dtype: torch.dtype, gpu: str) -> Tiles:
    """Tiles that fit in shared memory, with as many in flight as fit."""

    def stage_bytes(bn: int) -> int:
        return (bm + bn) * bk * dtype.itemsize

    while 2 * stage_bytes(bn) > _SHARED_BYTES[gpu] and bn > 32:
        bn //= 2
    stages = max(1, min(_STAGES[dtype], _SHARED_BYTES[gpu] // stage_bytes(bn)))
    return Tiles(bm, bn, bk, 8 if dtype == torch.float32 or bm * bn >= 128 * 128 else 4, stages)
