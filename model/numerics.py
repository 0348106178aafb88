"""What decides the bits of a forward beside the weights."""

from typing import NamedTuple

import torch

from ..kernels.tile_tables import DEFAULT_TABLE, TileTable, tile_table


class Numerics(NamedTuple):
    """What decides bits beside the weights: dtypes, of which None is the compute dtype, and a GPU's tiles."""

    lm_head: torch.dtype | None = None  # of the logits' matrix product
    # Keys and values are rounded to this dtype before attention reads them. Where it is narrower than the
    # compute dtype, the cache stores them in it.
    cache: torch.dtype | None = None
    tiles: TileTable = DEFAULT_TABLE  # of the matrix products along K
    router: torch.dtype | None = None  # of the logits of a mixture of experts


COMPUTE = Numerics()


def named_numerics(head_dtype: str, cache_dtype: str, tiles: str, router_dtype: str = "compute") -> Numerics:
    """Numerics from the settings precision.head_dtype, cache_dtype, tiles and router_dtype.

    The dtype "compute" is the compute dtype. Raises ValueError (see tile_table).
    """
    lm_head, cache, router = (
        None if name == "compute" else getattr(torch, name)
        for name in (head_dtype, cache_dtype, router_dtype)
    )
    return Numerics(lm_head, cache, tile_table(tiles), router)


class RoundThrough(torch.autograd.Function):
    """x rounded to a dtype and back; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None
