"""The heads of new tokens on their way to attention, in a decoding turn: one operation of three.

    q, k = rope(qk_norm(q, k));    the cache takes k and v, each at the token's place

Formulas and order are those of qk_norm.py and rope.py. On Triton it is one launch (decode_heads_triton.py),
as long as a head has at most 128 columns.

Shapes: n tokens; qkv [n, Hq + 2 Hkv, D]; wq, wk [D]; cos, sin [n, D/2]; q [n, Hq, D].
Roundings: those of the three operations. qk_norm's output is rounded once before rope reads it, and rope's
once more. The cache's dtype rounds k and v once.
"""

from typing import NamedTuple

import torch

from . import heads_cpp
from .attention_plan import KEY_TILE
from .backend import on_triton
from .qk_norm import qk_norm
from .rms_norm_cpp import norm_on_cpp
from .rope import rope


class CacheSlots(NamedTuple):
    """Where the keys and values of n tokens go in a layer's cache."""

    pages: torch.Tensor  # [blocks * Hkv, 2, KEY_TILE, D]
    block: torch.Tensor  # [n] int64
    offset: torch.Tensor  # [n] int64, in the block

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [n, Hkv, D]. A narrower cache rounds them."""
        by_token = self.pages.view(-1, k.shape[1], 2, KEY_TILE, k.shape[2]).permute(0, 3, 2, 1, 4)
        by_token.index_put_((self.block, self.offset), torch.stack([k, v], dim=1).to(self.pages.dtype))


class QKNormWeights(NamedTuple):
    """What qk_norm needs: the weights [D] of the queries and of the keys, and eps."""

    wq: torch.Tensor
    wk: torch.Tensor
    eps: float


def heads_to_cache_ref(
    qkv: torch.Tensor,
    norm: QKNormWeights | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    slots: CacheSlots,
) -> torch.Tensor:
    """The three operations one after another, wherever the tensors lie."""
    kv_heads = (qkv.shape[1] - heads) // 2
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if norm is not None:
        qk = qk_norm(qk, norm.wq, norm.wk, heads, norm.eps)
    q, k = rope(qk, cos, sin).split([heads, kv_heads], dim=1)
    slots.write(k, v)
    return q


def heads_to_cache(
    qkv: torch.Tensor,
    norm: QKNormWeights | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    slots: CacheSlots,
) -> torch.Tensor:
    """q [n, heads, D], after k and v were written to the cache. norm: None for a model without qk_norm.

    qkv [n, heads + 2 kv_heads, D]; cos, sin [n, D/2] in fp32. It has no gradient. Raises ValueError on a bad
    number of heads.
    """
    kv_heads, rest = divmod(qkv.shape[1] - heads, 2)
    if qkv.dim() != 3 or rest or kv_heads < 1 or heads < 1:
        raise ValueError(
            f"heads_to_cache: qkv {tuple(qkv.shape)} must be [n, heads ({heads}) + 2 kv_heads, D] "
            "with at least one key head"
        )
    if norm_on_cpp(qkv) and heads_cpp.fit(qkv, norm, cos, sin, *slots):
        return heads_cpp.heads_to_cache(qkv, norm, cos, sin, heads, *slots)
    if not on_triton(qkv):
        return heads_to_cache_ref(qkv, norm, cos, sin, heads, slots)
    from .decode_heads_triton import HEAD_COLUMNS
    from .decode_heads_triton import heads_to_cache as on_gpu

    if qkv.shape[2] > HEAD_COLUMNS:
        return heads_to_cache_ref(qkv, norm, cos, sin, heads, slots)
    weights = None if norm is None else (norm.wq.detach(), norm.wk.detach())
    eps = 0.0 if norm is None else norm.eps
    return on_gpu(qkv, weights, eps, cos, sin, heads, *slots)
