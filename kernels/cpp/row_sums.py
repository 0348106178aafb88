"""Row sums of the loops in C++: which vectors torch.sum has on this CPU."""

from functools import cache

import torch

from ...files.bitwise import equal
from . import call

# Lanes of torch's vectors of fp32: with AVX2, with AVX-512, and without either.
_LANES = (8, 16, 4)


@cache
def sum_lanes(width: int) -> int:
    """The lanes with which row_sum.h has the bits of torch.sum for rows of `width` numbers; 0 without any.

    The probe uses random numbers, which show the order of a sum.
    """
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x[0] = -0.0
    sums, expected = torch.empty(64, dtype=torch.float32), x.sum(-1)
    for lanes in _LANES:
        call("row_sums", None, x, sums, *x.shape, lanes)
        if equal(sums, expected):
            return lanes
    return 0
