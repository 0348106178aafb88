"""silu_mul through the loops of cpp/silu_mul.cpp, with the bits of its reference.

Shapes: gu [T, 2 I]; dy, y [T, I].
"""

from collections.abc import Iterator

import torch

from .cpp import call

# Elements of one pass, so that what it writes is still in a core's cache when it is read again.
_PASS_ELEMENTS = 1 << 17


def _passes(gu: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of each pass, and exp(-g) of them."""
    width = gu.shape[1] // 2
    rows = max(1, _PASS_ELEMENTS // width)
    for a in range(0, gu.shape[0], rows):
        part = gu[a : a + rows]
        e = torch.empty(part.shape[0], width, dtype=torch.float32)
        call("silu_minus_gate", gu.dtype, part, e, *e.shape)
        yield slice(a, a + rows), e.exp_()


def silu_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """The forward, [T, I]."""
    gu = gu.contiguous()
    y = torch.empty(gu.shape[0], gu.shape[1] // 2, dtype=gu.dtype)
    for rows, e in _passes(gu):
        call("silu_fwd", gu.dtype, gu[rows], e, y[rows], *e.shape)
    return y


def silu_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]."""
    dy, gu = dy.contiguous(), gu.contiguous()
    dgu = torch.empty(gu.shape, dtype=gu.dtype)
    for rows, e in _passes(gu):
        call("silu_bwd", gu.dtype, dy[rows], gu[rows], e, dgu[rows], *e.shape)
    return dgu
