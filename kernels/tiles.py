"""Tile sizes of the matrix products on a GPU. Nothing is timed at run time.

BLOCK_K is the tile along the reduced dimension. It comes from a committed table (tile_tables.py), which a
process fixes once. Tiles along M and N are free, with one exception: BLOCK_M is never below 64. On Hopper and
later a tile of fewer than 64 rows uses another tensor-core instruction (mma.sync) than a larger tile (wgmma,
tcgen05).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch

from .backend import INTERPRETED
from .tile_tables import TABLES, TileTable, minor_version

# BLOCK_K of the shapes that no table lists, by the size of the dtype.
_16_BIT, _32_BIT = 64, 32
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


class _FixedTable:
    """The table of this process. The first call of `fix` or `get` fixes it."""

    def __init__(self) -> None:
        self._table: TileTable | None = None

    def fix(self, vllm: str) -> None:
        table = TABLES[minor_version(vllm)]
        if self._table not in (None, table):
            raise ValueError(
                f"tiles: this process computes with the tiles of vLLM {self._table.vllm}; "
                f"start a new one for those of vLLM {table.vllm}"
            )
        self._table = table

    def get(self) -> TileTable:
        if self._table is None:
            self.fix(DEFAULT_TABLE)
        return self._table


DEFAULT_TABLE = "0.32"
_fixed = _FixedTable()


def fix_table(vllm: str) -> None:
    """Use the tiles of a vLLM version (tile_tables.minor_version) for every product of this process.

    This must be called before the first product. Raises ValueError for a version without a table, or when the
    process has already fixed another table.
    """
    _fixed.fix(vllm)


# The generation for which launches are recorded (kernels/compiled_cases.py); None outside `recording`.
_recording: ContextVar[str | None] = ContextVar("recording", default=None)


@contextmanager
def recording(target: str) -> Iterator[None]:
    """Use the tiles of an ahead-of-time target inside this context: sm_80, sm_90, sm_100 or gfx942."""
    capability = (int(target[3:-1]), int(target[-1])) if target.startswith("sm_") else None
    token = _recording.set(generation_of(capability))
    try:
        yield
    finally:
        _recording.reset(token)


def generation(device: torch.device) -> str:
    """The generation of the GPU `device`. Interpreted kernels take the tiles of Hopper."""
    return _recording.get() or _gpu_properties(device)[0]


def multiprocessors(device: torch.device) -> int:
    """The number of programs that run at once. It decides no bit."""
    return 132 if _recording.get() else _gpu_properties(device)[1]


@lru_cache(maxsize=16)
def _gpu_properties(device: torch.device) -> tuple[str, int]:
    """Generation and number of multiprocessors."""
    if INTERPRETED and device.type == "cpu":
        return "hopper", 4
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return generation_of(capability), torch.cuda.get_device_properties(device).multi_processor_count


def block_k(N: int, K: int, dtype: torch.dtype, gpu: str) -> int:
    """The tile along K of x [M, K] w [N, K]^T on a GPU of generation `gpu`."""
    if dtype == torch.float32:
        return _32_BIT
    tuned = _fixed.get().block_k(N, K, gpu) if dtype == torch.bfloat16 else None
    return tuned or _16_BIT


def matmul_tiles(M: int, N: int, K: int, dtype: torch.dtype, gpu: str) -> Tiles:
    """The configuration of x [M, K] w [N, K]^T on a GPU of generation `gpu`."""
    bm, bn = (64, 64) if dtype == torch.float32 else (64 if M <= 64 else 128, 128)
    return _fitting_tiles(bm, bn, block_k(N, K, dtype, gpu), dtype, gpu)


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


def _fitting_tiles(bm: int, bn: int, bk: int, dtype: torch.dtype, gpu: str) -> Tiles:
    """Tiles that fit in shared memory, with as many in flight as fit."""

    def stage_bytes(bn: int) -> int:
        return (bm + bn) * bk * dtype.itemsize

    while 2 * stage_bytes(bn) > _SHARED_BYTES[gpu] and bn > 32:
        bn //= 2
    stages = max(1, min(_STAGES[dtype], _SHARED_BYTES[gpu] // stage_bytes(bn)))
    return Tiles(bm, bn, bk, 8 if dtype == torch.float32 or bm * bn >= 128 * 128 else 4, stages)
