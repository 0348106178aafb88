"""rope, and the heads of new tokens in a decoding turn, through the loops of cpp/heads.cpp.

Both have the bits of their references: rope.py and decode_heads.py, which explain the shapes.
"""

import torch

from .attention_plan import KEY_TILE
from .cpp import call
from .rms_norm_cpp import norm_roots, tokens_apart


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """rope of x [n, H, D], or with `inverse` its backward. cos, sin [n, D/2] in any dtype of rope.py."""
    x, cos, sin = tokens_apart(x), cos.float().contiguous(), sin.float().contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    sign = -1.0 if inverse else 1.0
    call("rope", x.dtype, x, x.stride(0), cos, sin, sign, y, *x.shape)
    return y


def fit(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    block: torch.Tensor,
    offset: torch.Tensor,
) -> bool:
    """Whether these are what heads_to_cache takes. The reference refuses the rest, or takes it."""
    n, _, D = qkv.shape
    weights = () if norm is None else norm[:2]
    return (
        all(w.shape == (D,) and w.dtype == qkv.dtype for w in weights)
        and cos.shape == sin.shape == (n, D // 2)
        and D % 2 == 0
        and pages.dtype == qkv.dtype
        and pages.is_contiguous()
        and all(place.shape == (n,) and place.dtype == torch.int64 for place in (block, offset))
    )


def heads_to_cache(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    pages: torch.Tensor,
    block: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """q [n, heads, D], after k and v were written to the pages. Raises IndexError for a place past them."""
    qkv, cos, sin = qkv.contiguous(), cos.float().contiguous(), sin.float().contiguous()
    n, total, D = qkv.shape
    kv_heads = (total - heads) // 2
    roots = None if norm is None else norm_roots(qkv[:, : heads + kv_heads], norm[2])[0]
    wq, wk = (None, None) if norm is None else (w.contiguous() for w in norm[:2])
    q = torch.empty(n, heads, D, dtype=qkv.dtype)
    tensors = qkv, roots, wq, wk, cos, sin, q, pages, block.contiguous(), offset.contiguous()
    blocks = len(pages) // kv_heads
    if not call("heads_to_cache", qkv.dtype, *tensors, n, heads, kv_heads, D, KEY_TILE, blocks):
        raise IndexError(f"heads_to_cache: blocks {block.tolist()} must be in 0 .. {blocks - 1}")
    return q
