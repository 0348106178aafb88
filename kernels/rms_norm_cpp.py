"""rms_norm and qk_norm through the loops of cpp/rms_norm.cpp, with the bits of their references.

Shapes: x [T, D] or [T, H, D], whose tokens may lie apart; w: the weights [D] of the first `heads` heads and
of the others, the same one twice in rms_norm.
"""

import torch

from .backend import on_cpp
from .cpp import call
from .cpp.row_sums import sum_lanes
from .order import SUM_TILE

Weights = tuple[torch.Tensor, torch.Tensor]


def norm_on_cpp(x: torch.Tensor) -> bool:
    """Whether norms along the last axis of x run here."""
    return on_cpp(x) and x.shape[-1] <= SUM_TILE and sum_lanes(x.shape[-1]) > 0


def tokens_apart(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...], copied where a token of it does not lie in one piece."""
    return x if x.is_contiguous() or x[:1].is_contiguous() else x.contiguous()


def _sizes(x: torch.Tensor, heads: int) -> tuple[int, int, int, int]:
    """T, H, heads and D."""
    return x.shape[0], x.shape[1] if x.dim() == 3 else 1, heads, x.shape[-1]


def norm_roots(
    x: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(mean(s^2) + eps), [T] or [T, H] in fp32, and s = x + residual; without a residual s is x."""
    x = tokens_apart(x)
    s = x
    if residual is not None:
        x, residual, s = x.contiguous(), residual.contiguous(), torch.empty_like(residual)
    T, H, _, D = _sizes(x, 0)
    roots = torch.empty(x.shape[:-1], dtype=torch.float32)
    call("norm_means", x.dtype, x, x.stride(0), residual, s, roots, T, H, D, eps, sum_lanes(D))
    return roots.sqrt_(), s


def norm_fwd(
    x: torch.Tensor, w: Weights, heads: int, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, r and s, as rms_norm._forward has them."""
    (r, s), w = norm_roots(x, eps, residual), tuple(part.contiguous() for part in w)
    y = torch.empty(s.shape, dtype=s.dtype)
    call("norm_scale", s.dtype, s, s.stride(0), r, *w, y, *_sizes(s, heads))
    return y, r, s


def norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    r: torch.Tensor,
    w: Weights,
    heads: int,
    ds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx like dy, with ds added, and the contribution of each row to dw, like x but in fp32."""
    w = tuple(part.contiguous() for part in w)
    x, dy, ds = tokens_apart(x), dy.contiguous(), None if ds is None else ds.contiguous()
    dx, dw = torch.empty_like(dy), torch.empty(x.shape, dtype=torch.float32)
    lanes = sum_lanes(x.shape[-1])
    call("norm_bwd", x.dtype, dy, x, x.stride(0), r, *w, ds, dx, dw, *_sizes(x, heads), lanes)
    return dx, dw


def sum_heads(dw: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The sum over heads [first, end) of dw [T, H, D] in fp32, in the order of order.tree_sum: [T, D]."""
    T, H, D = dw.shape
    out = dw.new_empty(T, D)
    call("sum_heads", None, dw, out, T, H, first, end, D)
    return out
