"""The first divergence of two traces.

A trace holds the output of every operation of one forward, by name, in the order of computation.
"""

import math
from dataclasses import dataclass

import torch

from ..files.bitwise import ulp_distance, unequal

Trace = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OpDifference:
    """How far the two outputs of one operation are apart."""

    op: str
    elements: int
    unequal: int  # elements whose bits differ, or whose values differ if the dtypes are different
    max_ulp: int | None  # the largest distance in representable numbers; None for different dtypes
    max_abs: float
    relative: float  # root mean square of the difference, divided by the root mean square of the first output


def compare_traces(a: Trace, b: Trace) -> list[OpDifference]:
    """The differences of all operations that both traces hold, in the order of a.

    Raises ValueError when there is no such operation, or when the two outputs of one operation have different
    shapes.
    """
    shared = [name for name in a if name in b]
    if not shared:
        raise ValueError(
            "trace: the two have no operation in common "
            f"({', '.join(list(a)[:3])}, ... and {', '.join(list(b)[:3])}, ...)"
        )
    return [_compare(name, a[name], b[name]) for name in shared]


def one_sided(a: Trace, b: Trace) -> tuple[list[str], list[str]]:
    """The operations that only a holds, and those that only b holds."""
    return [name for name in a if name not in b], [name for name in b if name not in a]


def first_divergence(differences: list[OpDifference]) -> OpDifference | None:
    """The first operation whose outputs differ, or None."""
    return next((d for d in differences if d.unequal), None)


def _compare(name: str, x: torch.Tensor, y: torch.Tensor) -> OpDifference:
    if x.shape != y.shape:
        raise ValueError(f"trace: the outputs of {name} have shapes {tuple(x.shape)} and {tuple(y.shape)}")
    same_dtype = x.dtype == y.dtype
    xd, yd = x.double(), y.double()
    differs = unequal(x, y) if same_dtype else xd != yd
    distance = torch.where(differs, (xd - yd).abs(), 0.0)
    size = math.sqrt(float((xd * xd).mean()))
    if size:
        relative = math.sqrt(float((distance * distance).mean())) / size
    else:
        relative = math.inf if differs.any() else 0.0
    max_ulp = int(ulp_distance(x, y).max()) if same_dtype else None
    return OpDifference(name, x.numel(), int(differs.sum()), max_ulp, float(distance.max()), relative)
