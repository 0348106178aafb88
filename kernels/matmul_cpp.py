"""Products of rows with a weight through cpp/matmul.cpp, in fp32: each sum is one chain in ascending order.

So the bits of a row depend on nothing but the row and the weight. They are those of the reference where its
library sums in this way, which a probe finds (`agrees`): oneDNN does up to a width of 1,024.

Shapes: x [T, K]; w [N, K] or a transposed view; y [T, N]. N and K are multiples of ALIGN.
"""

from functools import cache

import torch

from .cpp import call


def pack_panels(w_NK: torch.Tensor) -> torch.Tensor:
    """A copy of w in the layout that the loops read, [N K] in fp32."""
    N, K = w_NK.shape
    panels = torch.empty(N * K, dtype=torch.float32)
    call("pack_panels", None, w_NK, w_NK.stride(1), w_NK.stride(0), panels, K, N)
    return panels


def product(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    panels: torch.Tensor | None = None,
    leaves: int = 1,
    widths: tuple[int, ...] = (),
) -> torch.Tensor:
    """x w^T, [T, N]. panels: the packed copy of w, where it is made. leaves, widths: see matmul_leaves."""
    panels = pack_panels(w_NK) if panels is None else panels
    (T, K), N = x_TK.shape, w_NK.shape[0]
    y = torch.empty(T, N, dtype=torch.float32)
    call("matmul_panels", None, x_TK, panels, y, T, N, K, _pieces(widths, leaves), len(widths), leaves)
    return y


@cache
def _pieces(widths: tuple[int, ...], leaves: int) -> torch.Tensor:
    """The numbers of each part of K that one leaf has, made once: a decoded token has many products."""
    return torch.tensor([width // leaves for width in widths], dtype=torch.int64)
