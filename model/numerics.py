"""What decides the bits of a forward beside the weights."""

from typing import NamedTuple

import torch

from ..kernels.attention_rule import WALK, AttentionRule, named_rule
from ..kernels.leaves import WHOLE, Leaves
from ..kernels.shared_experts import ALL_EXPERTS, SharedExperts
from ..kernels.tile_tables import DEFAULT_TABLE, TileTable, tile_table
from .quantisation import KvQuantisation


class Numerics(NamedTuple):
    """What decides bits beside the weights: dtypes, of which None is the compute dtype, and a GPU's tiles."""

    lm_head: torch.dtype | None = None  # of the logits' matrix product
    # Keys and values are rounded to this dtype before attention reads them. Where it is narrower than the
    # compute dtype, the cache stores them in it.
    cache: torch.dtype | None = None
    tiles: TileTable = DEFAULT_TABLE  # of the matrix products along K
    router: torch.dtype | None = None  # of the logits of a mixture of experts
    # How keys and values are quantised, instead of rounded to the dtype `cache`.
    kv: KvQuantisation | None = None
    attention: AttentionRule = WALK  # the order of its sums
    leaves: Leaves = WHOLE  # of the sums that tensor parallelism may cut, and the ranks that share them
    shared_experts: SharedExperts = ALL_EXPERTS  # the ranks that share the experts; they decide no bit
    prompts_once: bool = False  # whether training reads a prompt once where a layer keeps a state

    def cache_dtype(self, compute: torch.dtype) -> torch.dtype:
        """The dtype in which a cache stores keys and values. compute: the compute dtype.

        It is `cache` where that is narrower than the compute dtype, else the compute dtype. Keys and values
        were rounded to `cache` before, so storing them loses nothing.
        """
        return self.cache if self.cache is not None and self.cache.itemsize < compute.itemsize else compute

    def cache_rounds_once(self, compute: torch.dtype) -> bool:
        """Whether keys and values need no other rounding than to the dtype that the cache stores."""
        return self.kv is None and self.cache in (None, self.cache_dtype(compute))


COMPUTE = Numerics()


def named_numerics(
    head_dtype: str,
    cache_dtype: str,
    tiles: str,
    router_dtype: str = "compute",
    kv: str = "",
    attention: str = "vllm",
    leaves: int = 1,
    state_prompts: str = "each",
) -> Numerics:
    """Numerics from the settings of these names in the section precision.

    The dtype "compute" is the compute dtype. Raises ValueError (see tile_table, KvQuantisation.parse,
    named_rule and Leaves).
    """
    lm_head, cache, router = (
        None if name == "compute" else getattr(torch, name)
        for name in (head_dtype, cache_dtype, router_dtype)
    )
    return Numerics(
        lm_head=lm_head,
        cache=cache,
        tiles=tile_table(tiles),
        router=router,
        kv=KvQuantisation.parse(kv) if kv else None,
        attention=named_rule(attention),
        leaves=Leaves(leaves),
        prompts_once=state_prompts == "once",
    )
