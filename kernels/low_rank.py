"""LoRA's adapters of a weight: their gradient, and what they add to a product that they are not merged into.

    y = x (w + s b a)^T         db += sum over token blocks of dy_t^T (s x a^T)_t
                                da += sum over token blocks of (s dy b)_t^T x_t

This is the derivative in b and a (Hu et al., arXiv:2106.09685, section 4.1). The products are taken in
another order than in db = s (dy^T x) a^T, which needs dw = dy^T x [N, K]. So no gradient of the weight's own
size is formed.

Where w is not merged with them (linear.Adapted), the products are added:

    y += (s x a^T) b^T          dx += (s dy b) a

Shapes: T rows (tokens); x [T, K]; dy [T, N]; b [N, r] and a [r, K] of the rank r; x a^T and dy b [T, r]. A
weight may be several matrices, one after another along N, each with an adapter of its own: q, k and v for
example. dy of such a part are its columns of the weight's dy.
Roundings: x and dy are exact in fp32. Each element of x a^T and of dy b is summed in fp32, and the product
with s rounds it once more: not at all where s is a power of two. da and db are sums in fp32 (fp64 for fp64).
What is added to y and dx is one more sum in fp32, and it is added in fp32.
Order: a row of x a^T and of dy b has the order of matmul.matmul, and knows no other row. Where tensor
parallelism may cut it, it is a sum of leaves (leaves.py): x a^T of o and down, dy b of the others. da and db
are summed as each weight's gradient is: over the token blocks of the pass, in their order (matmul.add_outer).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from .backend import on_triton
from .grad import GradBuffer, accumulate_dtype
from .leaves import UNCUT, Cut
from .matmul import add_outer, matmul
from .order import ALIGN, TokenBlocks
from .shared_rows import ALL_ROWS, SharedRows

X = TypeVar("X", "LowRank", "AdapterBuffers")


class LowRank(NamedTuple):
    """One adapter."""

    rows: slice  # of the weight, along N: the matrix that has this adapter
    b: torch.Tensor
    a: torch.Tensor
    scale: float  # s


class AdapterBuffers(NamedTuple):
    """One adapter (LowRank), and where its gradient is summed."""

    rows: slice
    b: torch.Tensor
    a: torch.Tensor
    scale: float
    db: GradBuffer
    da: GradBuffer


class LowRankBuffers(NamedTuple):
    """The adapters of one weight. It takes the place of the weight's own gradient buffer (passes.py)."""

    adapters: tuple[AdapterBuffers, ...]


def add_low_rank(
    buffers: LowRankBuffers,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    blocks: TokenBlocks,
    cut: Cut = UNCUT,
    shared: SharedRows = ALL_ROWS,
) -> None:
    """Add the gradients of the weight's adapters, block by block in the order of `blocks`.

    cut: of the weight. Where ranks share it, each has its rows of b, or its columns of a. shared: the ranks
    that share the rows.
    """
    x = x_TK.to(accumulate_dtype(x_TK.dtype))
    rows = shared.whole(x_TK).to(x.dtype)
    for adapter in buffers.adapters:
        dy = dy_TN[:, adapter.rows].to(x.dtype).contiguous()
        padded = padded_rank(adapter, blocks) if on_triton(x) else adapter
        x_a, dy_b = low_rank_rows(padded, dy, x, cut.within(adapter.rows))
        add_outer(padded.db, shared.columns(dy), shared.whole(x_a), blocks)
        add_outer(padded.da, shared.columns(dy_b), rows, blocks)
        if padded is not adapter:
            rank = len(adapter.a)
            adapter.db.sums.copy_(padded.db.sums[:, :, :rank])
            adapter.da.sums.copy_(padded.da.sums[:, :rank])


def padded_rank(adapter: AdapterBuffers, blocks: TokenBlocks) -> AdapterBuffers:
    """The adapter with its rank padded with zeros to a multiple of 16, over copies of its buffers.

    Rows of other widths are read number by number, and such kernels spill registers. The padding decides no
    bit: each sum is as long as before. The caller copies the sums back.
    """
    padding = -len(adapter.a) % ALIGN
    if not padding:
        return adapter
    db, da = (buffer.zeroed(blocks.shards) for buffer in (adapter.db, adapter.da))
    return _padded(adapter, padding)._replace(
        db=GradBuffer(F.pad(db, (0, padding))),
        da=GradBuffer(F.pad(da, (0, 0, 0, padding))),
    )


def _padded(adapter: X, padding: int) -> X:
    return adapter._replace(b=F.pad(adapter.b, (0, padding)), a=F.pad(adapter.a, (0, 0, 0, padding)))


def add_to_product(
    y_TN: torch.Tensor, x_TK: torch.Tensor, adapters: Iterable[LowRank], cut: Cut = UNCUT
) -> None:
    """y += (s x a^T) b^T, one adapter after another. y and x are fp32 (or fp64). cut: of the weight."""
    for adapter in adapters:
        b, a = _factors(adapter, y_TN.dtype)
        y_TN[:, adapter.rows] += matmul(_x_a(x_TK, a, cut).mul_(adapter.scale), b)


def add_to_input_gradient(
    dx_TK: torch.Tensor, dy_TN: torch.Tensor, adapters: Iterable[LowRank], cut: Cut = UNCUT
) -> None:
    """dx += (s dy b) a, one adapter after another. dx and dy are fp32 (or fp64). cut: of the weight."""
    for adapter in adapters:
        b, a = _factors(adapter, dx_TK.dtype)
        dy_b = _dy_b(dy_TN[:, adapter.rows].contiguous(), b, cut.within(adapter.rows))
        dx_TK += matmul(dy_b.mul_(adapter.scale), a.t())


def _factors(adapter: LowRank, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """b and a. For a GPU their rank is padded, as in padded_rank."""
    if on_triton(adapter.a):
        adapter = _padded(adapter, -len(adapter.a) % ALIGN)
    return adapter.b.to(dtype), adapter.a.to(dtype)


def by_matrix(adapters: Iterable[X], width: int, experts: int) -> dict[int, list[X]]:
    """By the first row of a matrix in its expert's, of `width` rows, the adapters of all experts in order."""
    matrices: dict[int, list[X]] = {}
    for adapter in sorted(adapters, key=lambda adapter: adapter.rows.start):
        matrices.setdefault(adapter.rows.start % width, []).append(adapter)
    assert all(len(alike) == experts for alike in matrices.values()), "an expert without its adapter"
    return matrices


def stacked_factors(adapters: Sequence[X], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """b [E, n, r] and a [E, r, K] of one matrix of each expert. For a GPU the rank is padded."""
    b, a = stacked([adapter.b for adapter in adapters]), stacked([adapter.a for adapter in adapters])
    padding = -a.shape[1] % ALIGN if on_triton(a) else 0
    if padding:
        b, a = F.pad(b, (0, padding)), F.pad(a, (0, 0, 0, padding))
    return b.to(dtype), a.to(dtype)


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors of one shape, at equal distances in one memory, as one view [len(parts), *shape]."""
    first, *others = parts
    offsets = [part.storage_offset() for part in parts]
    step = offsets[1] - offsets[0] if others else first.numel()
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1, "parts of other memories"
    assert step >= first.numel(), "parts that overlap"
    assert all(b - a == step for a, b in pairwise(offsets)), "parts at other distances"
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def low_rank_rows(
    adapter: AdapterBuffers, dy_TN: torch.Tensor, x_TK: torch.Tensor, cut: Cut = UNCUT
) -> tuple[torch.Tensor, torch.Tensor]:
    """s x a^T and s dy b, [T, r] each. dy: the columns of the adapter's matrix. Both are fp32 (or fp64).

    cut: of this matrix.
    """
    b, a = adapter.b.to(x_TK.dtype), adapter.a.to(x_TK.dtype)
    return _x_a(x_TK, a, cut).mul_(adapter.scale), _dy_b(dy_TN, b, cut).mul_(adapter.scale)


def _x_a(x_TK: torch.Tensor, a: torch.Tensor, cut: Cut) -> torch.Tensor:
    return cut.product(x_TK, a) if cut.joins_output else matmul(x_TK, a)


def _dy_b(dy_TN: torch.Tensor, b: torch.Tensor, cut: Cut) -> torch.Tensor:
    """cut: of the adapter's matrix."""
    return cut.product(dy_TN, b.t()) if cut.joins_dx else matmul(dy_TN, b.t())
