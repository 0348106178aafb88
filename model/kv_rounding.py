"""Keys and values as attention reads them: rounded to a dtype, or quantised to 8 bits and back.

    q(x) = s Q(x / s), rounded once to the dtype of x; s and Q are those of kernels/quantise.py

s is 1 (`unit`), or max |x| / m of a token's keys, and of its values (`token`), or of each of their heads
(`token_head`). So the keys and values of a token depend on nothing else. This is the law.

They are rounded before they are written to a cache, and the forward of the trainer rounds them in the same
place. The keys of a chunk of a prompt are rounded too before the chunk attends to them. There are engines
that attend to them as they are, and round only what they store.

Gradient: it passes unchanged, clipped elements too (straight-through: Bengio et al., arXiv:1308.3432).
Shapes: x is k or v, [T, Hkv, D].
"""

from collections.abc import Callable

import torch

from ..kernels.quantise import clipped, quantise
from .numerics import Numerics
from .quantisation import KvQuantisation

_ROW = 1  # a scale for each row of a matrix, for kernels/quantise.py


def rounded_kv(x: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """k or v [T, Hkv, D] in its compute dtype, as these numerics have it."""
    if numerics.kv is not None:
        how = numerics.kv
        return _RoundThrough.apply(x, lambda x: quantised_kv(x, how))
    if numerics.cache in (None, x.dtype):
        return x
    return _RoundThrough.apply(x, lambda x: x.to(numerics.cache))


def quantised_kv(x: torch.Tensor, how: KvQuantisation) -> torch.Tensor:
    """q(x) in fp32, before it is rounded to the dtype of x."""
    if how.scale == "unit":
        return clipped(x, how.format)
    parts = x.flatten(1) if how.scale == "token" else x.flatten(0, 1)
    return quantise(parts, how.format, _ROW, how.power_of_two).view(x.shape)


class _RoundThrough(torch.autograd.Function):
    """rounding(x) in the dtype of x; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x, rounding: Callable[[torch.Tensor], torch.Tensor]):
        return rounding(x).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None
