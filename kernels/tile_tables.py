"""BLOCK_K of the matrix products on a GPU: committed tables, one for each vLLM version.

BLOCK_K is the tile along the reduced dimension, and it orders a sum. It depends on (N, K, dtype) and on the
GPU's generation only. It is the BLOCK_K that vLLM uses in batch-invariant mode
(vllm/model_executor/determinism/batch_invariant.py and batch_invariant_configs.py). The tests compare the
two. vLLM 0.33 has tuned more shapes than 0.32. So the version is a setting of a run (precision.tiles), and
its table is handed to every product: a decoder has it in its numerics.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Shapes = tuple[tuple[int, int], ...]  # (N, K) of bf16 products


@dataclass(frozen=True)
class TileTable:
    """The table of one vLLM version: generation -> BLOCK_K -> the shapes that have this BLOCK_K.

    All other shapes have the default of the dtype.
    """

    vllm: str
    tuned: Mapping[str, Mapping[int, Shapes]]

    def block_k(self, N: int, K: int, generation: str) -> int | None:
        """The tile of a bf16 product x [M, K] w [N, K]^T if vLLM has tuned it, else None."""
        tuned = self.tuned.get(generation, {}).items()
        return next((block_k for block_k, shapes in tuned if (N, K) in shapes), None)


# The tables leave out every shape that vLLM tunes to the default.
_HOPPER_0_32: Shapes = ((12288, 2048), (2048, 6144), (4096, 2048), (151936, 2048), (2048, 2048))
_HOPPER_MORE_IN_0_33: Shapes = (
    (24576, 4096),
    (4096, 12288),
    (6144, 4096),
    (4096, 4096),
    (151936, 4096),
    (4096, 14336),
    (128256, 4096),
)
_SM120_128: Shapes = (
    (4096, 2048),
    (2560, 9728),
    (2560, 4096),
    (4096, 12288),
    (4096, 4096),
    (2048, 3072),
    (2048, 768),
    (2560, 4864),
    (3072, 2560),
    (37984, 2560),
    (768, 2560),
    (1536, 4096),
    (768, 4096),
)
_TUNED_0_32: dict[str, dict[int, Shapes]] = {
    "ada": {128: ((2048, 6144),)},
    "hopper": {128: _HOPPER_0_32},
    "blackwell": {128: ((2048, 6144), (4096, 2048), (2048, 2048))},
    "sm120": {32: ((2048, 2048), (4096, 1536)), 128: _SM120_128},
}
TABLES: dict[str, TileTable] = {
    "0.32": TileTable("0.32", _TUNED_0_32),
    "0.33": TileTable("0.33", _TUNED_0_32 | {"hopper": {128: _HOPPER_0_32 + _HOPPER_MORE_IN_0_33}}),
}


DEFAULT_TABLE = TABLES["0.32"]


def tile_table(vllm: str) -> TileTable:
    """The table of a version of vLLM. Raises ValueError for a version without a table (minor_version)."""
    return TABLES[minor_version(vllm)]


def minor_version(vllm: str) -> str:
    """The key in TABLES of a version of vLLM such as "0.32.1", "0.33.0+cpu" or "vllm-0.32".

    Raises ValueError for a version without a table.
    """
    minor = ".".join(vllm.removeprefix("vllm-").split(".")[:2])
    if minor not in TABLES:
        raise ValueError(
            f"tiles: vLLM's version ({vllm}) must be one of {', '.join(TABLES)}, "
            "whose tables are in kernels/tile_tables.py"
        )
    return minor
