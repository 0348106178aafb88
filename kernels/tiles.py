"""Tile sizes of the matrix products on a GPU. Nothing is timed at run time.

BLOCK_K, the tile along the reduced dimension, comes from a committed table (tile_tables.py), which a process
fixes when it starts. Tiles along M and N are free, with one exception: on Hopper and later a tile of fewer
than 64 rows is computed by another tensor-core instruction (mma.sync) than a larger one (wgmma, tcgen05), so
BLOCK_M is never below 64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch

from .backend import INTERPRETED
from .tile_tables import TABLES, TileTable, minor_version

# BLOCK_K of shapes that no table names.
_16_BIT, _32_BIT = 64, 32
# Shared memory one program may fill with tiles in flight, bytes, a little below what a multiprocessor has.
_SHARED_BYTES = {
    "ada": 96 << 10,
    "sm120": 96 << 10,
    "hopper": 208 << 10,
    "blackwell": 208 << 10,
    "ampere": 156 << 10,
    "amd": 60 << 10,
}
_STAGES = {torch.float32: 3, torch.bfloat16: 4, torch.float16: 4}  # tiles in flight at most


class Tiles(NamedTuple):
    """One launch configuration of a matrix product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def generation_of(capability: tuple[int, int] | None) -> str:
    """The name of a CUDA compute capability's generation in the tables; None is an AMD GPU."""
    if capability is None:
        return "amd"
    major, minor = capability
    return {12: "sm120", 10: "blackwell", 9: "hopper"}.get(
        major, "ada" if (major, minor) == (8, 9) else "ampere"
    )


class _FixedTable:
    """The table of this process: fixed once, by the first to ask."""

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
    """Take the tiles of a vLLM version (tile_tables.minor_version) for every product of this process.

    To be called before the first product. Raises ValueError for a version without a table, or where another
    one is fixed.
    """
    _fixed.fix(vllm)


# The generation for which launches are recorded (kernels/configurations.py), if they are.
_recording: ContextVar[str | None] = ContextVar("recording", default=None)


@contextmanager
def recording(target: str) -> Iterator[None]:
    """Inside it tiles are those of an ahead-of-time target: sm_80, sm_90, sm_100 or gfx942."""
    capability = (int(target[3:-1]), int(target[-1])) if target.startswith("sm_") else None
    token = _recording.set(generation_of(capability))
    try:
        yield
    finally:
        _recording.reset(token)


def generation(device: torch.device) -> str:
    """The generation of the GPU that `device` is. Interpreted kernels take Hopper's tiles."""
    return _recording.get() or _found(device)[0]


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once; decides no bit."""
    return 132 if _recording.get() else _found(device)[1]


@lru_cache(maxsize=16)
def _found(device: torch.device) -> tuple[str, int]:
    if INTERPRETED and device.type == "cpu":
        return "hopper", 4
    capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    return generation_of(capability), torch.cuda.get_device_properties(device).multi_processor_count


def block_k(N: int, K: int, dtype: torch.dtype, where: str) -> int:
    """Tile along K of x [M, K] w [N, K]^T."""
    if dtype == torch.float32:
        return _32_BIT
    tuned = _fixed.get().block_k(N, K, where) if dtype == torch.bfloat16 else None
    return tuned or _16_BIT


def matmul_tiles(M: int, N: int, K: int, dtype: torch.dtype, where: str) -> Tiles:
    """The configuration of x [M, K] w [N, K]^T on a GPU of generation `where`."""
    bm, bn = (64, 64) if dtype == torch.float32 else (64 if M <= 64 else 128, 128)
    return _launch(bm, bn, block_k(N, K, dtype, where), dtype, where)


def outer_tiles(dtype: torch.dtype, where: str) -> Tiles:
    """The configuration of a weight gradient; block_m along N, block_n along K, and block_k along the tokens,
    which it orders.
    """
    if dtype == torch.float32:
        return Tiles(64, 64, 16, 4, 3)  # registers spill with longer tiles
    if where in ("hopper", "blackwell"):
        return _launch(128, 128, _16_BIT, dtype, where)
    return _launch(128, 64, _16_BIT, dtype, where)._replace(
        num_warps=8
    )  # their accumulators lie in registers: 128 x 128 spills


def _launch(bm: int, bn: int, bk: int, dtype: torch.dtype, where: str) -> Tiles:
    """Tiles that fit in shared memory, and as many of them in flight as do."""

    def stage(bn: int) -> int:
        return (bm + bn) * bk * dtype.itemsize

    while 2 * stage(bn) > _SHARED_BYTES[where] and bn > 32:
        bn //= 2
    stages = max(1, min(_STAGES[dtype], _SHARED_BYTES[where] // stage(bn)))
    return Tiles(bm, bn, bk, 8 if dtype == torch.float32 or bm * bn >= 128 * 128 else 4, stages)
