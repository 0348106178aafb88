"""The sum of the residual stream and a branch."""

from __future__ import annotations

from collections.abc import Iterator

from ....model.operation import Equation
from ..changed_operation import Change, ChangedOperation, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """One of the two left out."""
    yield "it leaves the residual stream out", traced.inputs[1]
    yield "it leaves the branch out: it is the residual stream before", traced.inputs[0]


CHANGED = ChangedOperation(equations=(Equation.SUM,), changes=changes)
