"""silu_mul and gelu_mul through the loops of cpp/silu_mul.cpp, with the bits of their references.

Shapes: gu [T, 2 I]; dy, y [T, I].
"""

from collections.abc import Iterator

import torch

from .cpp import call

# Elements of one pass, so that what it writes is still in a core's cache when it is read again.
_PASS_ELEMENTS = 1 << 17


def _passes(gu: torch.Tensor, gate: str) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of each pass, and exp(-z) of them."""
    width = gu.shape[1] // 2
    rows = max(1, _PASS_ELEMENTS // width)
    for a in range(0, gu.shape[0], rows):
        part = gu[a : a + rows]
        e = torch.empty(part.shape[0], width, dtype=torch.float32)
        call(f"{gate}_minus_gate", gu.dtype, part, e, *e.shape)
        yield slice(a, a + rows), e.exp_()


def silu_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """The forward, [T, I]."""
    return _forward(gu, "silu")


def gelu_mul_fwd(gu: torch.Tensor) -> torch.Tensor:
    """The forward, [T, I]."""
    return _forward(gu, "gelu")


def silu_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]."""
    return _backward(dy, gu, "silu")


def gelu_mul_bwd(dy: torch.Tensor, gu: torch.Tensor) -> torch.Tensor:
    """The gradient of gu, [T, 2 I]."""
    return _backward(dy, gu, "gelu")


def _forward(gu: torch.Tensor, gate: str) -> torch.Tensor:
    """Both have g / (1 + exp(-z)) u."""
    gu = gu.contiguous()
    y = torch.empty(gu.shape[0], gu.shape[1] // 2, dtype=gu.dtype)
    for rows, e in _passes(gu, gate):
        call("silu_fwd", gu.dtype, gu[rows], e, y[rows], *e.shape)
    return y


def _backward(dy: torch.Tensor, gu: torch.Tensor, gate: str) -> torch.Tensor:
    dy, gu = dy.contiguous(), gu.contiguous()
    dgu = torch.empty(gu.shape, dtype=gu.dtype)
    for rows, e in _passes(gu, gate):
        call(f"{gate}_bwd", gu.dtype, dy[rows], gu[rows], e, dgu[rows], *e.shape)
    return dgu
