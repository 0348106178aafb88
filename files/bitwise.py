"""Bitwise comparison of integer views: every element, no tolerance.

-0.0 is not 0.0. A NaN equals a NaN of the same bits.
"""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integer view of x, contiguous."""
    return x.detach().contiguous().view(_INTEGERS[x.element_size()])


def unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """True where the bits differ. Raises ValueError when the shapes or the dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            f"unequal: a {tuple(a.shape)} {a.dtype} and b {tuple(b.shape)} {b.dtype} "
            "must have one shape and dtype"
        )
    return bits(a) != bits(b)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits of a and b are equal. Raises ValueError when the shapes or the dtypes differ."""
    return not bool(unequal(a, b).any())


def count_unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    """The number of elements whose bits differ."""
    return int(unequal(a, b).sum())


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers a and b are apart, int64 of their shape.

    The distance is 0 for equal bits, and 1 between -0.0 and 0.0.
    """
    unequal(a, b)  # checks shape and dtype

    def ordered(x: torch.Tensor) -> torch.Tensor:
        i = bits(x).to(torch.int64)
        smallest = -(1 << (8 * x.element_size() - 1))
        return torch.where(i < 0, smallest - i - 1, i)

    return (ordered(a) - ordered(b)).abs()
