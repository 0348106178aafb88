"""A weight with its LoRA adapter merged in (Hu et al., "LoRA", arXiv:2106.09685, section 4.1).

    y = round(w + s (b a))

Shapes: w, y [N, K]; b [N, r] and a [r, K] in fp32 (fp64 for fp64); r the rank, s a number.

Order: the sum over the rank begins with +0.0 and takes i = 0, 1, ..., r - 1, one product after another. Each
element of y depends on its own element of w, its row of b and its column of a. So any cut of a matrix gives
the same bits.
Roundings: each product b[n, i] a[i, k], each sum after it, the product with s, and the sum with w are rounded
to fp32. The result is rounded once to the dtype of y. No product is fused with a sum. So the reference and
Triton have the same bits, on every machine.

The gradient counts the rounding as the identity: low_rank.py.
"""

import torch

from .backend import on_triton
from .grad import accumulate_dtype
from .order import tree_sum

# Elements of one turn of the reference, so few that its temporaries stay in a core's cache; and of one
# turn on a GPU. They decide no bit.
_PASS_ELEMENTS, _GPU_PASS_ELEMENTS = 1 << 16, 1 << 24


def merge_ref(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> None:
    """The reference of merge."""
    dtype = accumulate_dtype(b.dtype)
    rows = max(1, _PASS_ELEMENTS // w.shape[1])
    for start in range(0, w.shape[0], rows):
        part = slice(start, start + rows)
        merged = w[part].to(dtype)
        total, product = torch.zeros_like(merged), torch.empty_like(merged)
        for i in range(a.shape[0]):
            total.add_(torch.mul(b[part, i : i + 1], a[i], out=product))
        y[part].copy_(total.mul_(s).add_(merged))


def merge(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> None:
    """Write w + s (b a) to `y`. s: a number that fp32 rounds.

    All are contiguous; w and y may have different dtypes. Raises ValueError where the shapes do not fit.
    """
    (N, K), rank = w.shape, a.shape[0]
    if y.shape != (N, K) or b.shape != (N, rank) or a.shape != (rank, K):
        raise ValueError(
            f"merge: y {tuple(y.shape)}, b {tuple(b.shape)} and a {tuple(a.shape)} must be "
            f"[N, K], [N, r] and [r, K] of w {tuple(w.shape)}"
        )
    if on_triton(b):
        from .merge_triton import merge as merge_triton

        merge_triton(y, w, b, a, s)
    else:
        merge_ref(y, w, b, a, s)


def swallowed_rows(
    y: torch.Tensor, w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float
) -> torch.Tensor:
    """What the rounding of y = round(w + s (b a)) swallows, by rows: [N, 2] fp32.

    The first column is the sum of |s (b a)| over the elements of a row whose y is what w alone rounds to; the
    second is the sum over all. Each row has one order (order.tree_sum). All are contiguous.
    """
    N, K = w.shape
    sums = torch.empty(N, 2, device=w.device)
    rows = max(1, (_GPU_PASS_ELEMENTS if w.is_cuda else _PASS_ELEMENTS) // K)
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        update = torch.empty(y[part].shape, device=w.device)
        merge(update, torch.zeros_like(update), b[part], a, s)
        is_lost = y[part] == w[part].to(y.dtype)
        sums[part, 1] = tree_sum(update.abs_(), 1)
        sums[part, 0] = tree_sum(update.mul_(is_lost), 1)
    return sums
