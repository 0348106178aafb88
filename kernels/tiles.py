"""Tile sizes of the matrix products on a GPU: a committed table, nothing is timed at run time.

BLOCK_K, the tile along the reduced dimension, orders a sum: it depends on (N, K, dtype) and the GPU's generation only, and is the one
vLLM uses there in batch-invariant mode (vllm/model_executor/determinism/batch_invariant.py and batch_invariant_configs.py; the tests
compare). vLLM 0.33 has tuned more shapes than 0.32, so whose table it is belongs to a run's settings (precision.tiles). Tiles along M
and N are free, with one exception: on Hopper and later a tile of fewer than 64 rows is computed by another tensor-core instruction
(mma.sync) than a larger one (wgmma, tcgen05), so BLOCK_M is never below 64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from .backend import INTERPRETED

_16_BIT, _32_BIT = 64, 32
# bf16 only: (N, K) whose BLOCK_K is not _16_BIT, by generation, as in vLLM 0.32. Everything vLLM tunes to 64 is left out.
_OF_0_32: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {
    "ada": {128: ((2048, 6144),)},
    "hopper": {128: ((12288, 2048), (2048, 6144), (4096, 2048), (151936, 2048), (2048, 2048))},
    "blackwell": {128: ((2048, 6144), (4096, 2048), (2048, 2048))},
    "sm120": {
        32: ((2048, 2048), (4096, 1536)),
        128: (
            (4096, 2048), (2560, 9728), (2560, 4096), (4096, 12288), (4096, 4096), (2048, 3072), (2048, 768), (2560, 4864), (3072, 2560),
            (37984, 2560), (768, 2560), (1536, 4096), (768, 4096),
        ),
    },
}  # fmt: skip
_MORE_IN_0_33 = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096), (151936, 4096), (4096, 14336), (128256, 4096))
_BLOCK_K = {"0.32": _OF_0_32, "0.33": _OF_0_32 | {"hopper": {128: _OF_0_32["hopper"][128] + _MORE_IN_0_33}}}
VLLM = tuple(_BLOCK_K)
# Shared memory one program may fill with tiles in flight, bytes, a little below what a multiprocessor has.
_SHARED_BYTES = {"ada": 96 << 10, "sm120": 96 << 10, "hopper": 208 << 10, "blackwell": 208 << 10, "ampere": 156 << 10, "amd": 60 << 10}
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
    return {12: "sm120", 10: "blackwell", 9: "hopper"}.get(major, "ada" if (major, minor) == (8, 9) else "ampere")


# Whose table this process follows.
_followed = VLLM[0]


def minor_version(vllm: str) -> str:
    """The table, of VLLM, of a version of vLLM such as "0.32.1", "0.33.0+cpu" or "vllm-0.32". Raises ValueError when there is none."""
    minor = ".".join(vllm.removeprefix("vllm-").split(".")[:2])
    if minor not in VLLM:
        raise ValueError(f"tiles: vLLM's version ({vllm}) must be one of {', '.join(VLLM)}, whose tables are in kernels/tiles.py")
    return minor


def follow(vllm: str) -> None:
    """Take a vLLM's tiles (see minor_version) for every product of this process from now on. Raises ValueError."""
    global _followed
    _followed = minor_version(vllm)


# The generation for which launches are recorded (kernels/configurations.py), if they are.
_recording: str | None = None


@contextmanager
def recording(target: str) -> Iterator[None]:
    """Inside it tiles are those of an ahead-of-time target: sm_80, sm_90, sm_100 or gfx942."""
    global _recording
    _recording = generation_of((int(target[3:-1]), int(target[-1])) if target.startswith("sm_") else None)
    try:
        yield
    finally:
        _recording = None


def generation(device: torch.device) -> str:
    """The generation of the GPU that `device` is. Interpreted kernels take Hopper's tiles."""
    return _recording or _found(device)[0]


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once; decides no bit."""
    return 132 if _recording else _found(device)[1]


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
    if dtype == torch.bfloat16:
        for size, shapes in _BLOCK_K[_followed].get(where, {}).items():
            if (N, K) in shapes:
                return size
    return _16_BIT


def matmul_tiles(M: int, N: int, K: int, dtype: torch.dtype, where: str) -> Tiles:
    """The configuration of x [M, K] w [N, K]^T on a GPU of generation `where`."""
    bm, bn = (64, 64) if dtype == torch.float32 else (64 if M <= 64 else 128, 128)
    return _launch(bm, bn, block_k(N, K, dtype, where), dtype, where)


def outer_tiles(dtype: torch.dtype, where: str) -> Tiles:
    """The configuration of a weight gradient; block_m along N, block_n along K, and block_k along the tokens, which it orders."""
    if dtype == torch.float32:
        return Tiles(64, 64, 16, 4, 3)  # registers spill with longer tiles
    if where in ("hopper", "blackwell"):
        return _launch(128, 128, _16_BIT, dtype, where)
    return _launch(128, 64, _16_BIT, dtype, where)._replace(num_warps=8)  # their accumulators lie in registers: 128 x 128 spills


def _launch(bm: int, bn: int, bk: int, dtype: torch.dtype, where: str) -> Tiles:
    """Tiles that fit in shared memory, and as many of them in flight as do."""

    def stage(bn: int) -> int:
        return (bm + bn) * bk * dtype.itemsize

    while 2 * stage(bn) > _SHARED_BYTES[where] and bn > 32:
        bn //= 2
    stages = max(1, min(_STAGES[dtype], _SHARED_BYTES[where] // stage(bn)))
    return Tiles(bm, bn, bk, 8 if dtype == torch.float32 or bm * bn >= 128 * 128 else 4, stages)
