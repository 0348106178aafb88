"""Two traces, compared operation by operation.

A trace holds the output of every operation of one forward, by name, in the order of computation.
"""

import math
from dataclasses import dataclass

import torch

from ..files.bitwise import ulp_distance, unequal
from .difference import differences
from .distance import ulp_words

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

    @property
    def words(self) -> str:
        """How many outputs differ, and by how much."""
        ulp = f" ({words})" if (words := ulp_words(self.max_ulp)) else ""
        return f"{self.unequal} of {self.elements} outputs differ, by up to {self.max_abs:.3g}{ulp}"


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


def first_divergence(a: Trace, b: Trace) -> OpDifference | None:
    """The first operation of both whose outputs differ, in the order of a, or None.

    Raises ValueError when its two outputs have different shapes.
    """
    each = (d for d in differences(a, b, _same) if d.missing is None)
    return next((_compare(d.quantity, *d.values) for d in each), None)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and not bool(_differs(x, y).any())


def _differs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two outputs of one shape differ: in their bits, or, of two dtypes, in their values."""
    return unequal(x, y) if x.dtype == y.dtype else x.double() != y.double()


def _compare(name: str, x: torch.Tensor, y: torch.Tensor) -> OpDifference:
    if x.shape != y.shape:
        raise ValueError(f"trace: the outputs of {name} have shapes {tuple(x.shape)} and {tuple(y.shape)}")
    xd, yd, differs = x.double(), y.double(), _differs(x, y)
    distance = torch.where(differs, (xd - yd).abs(), 0.0)
    size = math.sqrt(float((xd * xd).mean()))
    if size:
        relative = math.sqrt(float((distance * distance).mean())) / size
    else:
        relative = math.inf if differs.any() else 0.0
    max_ulp = int(ulp_distance(x, y).max()) if x.dtype == y.dtype else None
    return OpDifference(name, x.numel(), int(differs.sum()), max_ulp, float(distance.max()), relative)
