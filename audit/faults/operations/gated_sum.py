"""The sum of what the chosen experts give and of a shared expert behind its gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ..changed_operation import Change, ChangedOperation, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """The gate left out or taken as it is; one of the two left out."""
    chosen, shared, z = traced.inputs
    gated = torch.sigmoid(z) * shared
    yield "the shared expert has no gate", chosen + shared
    yield "the shared expert's gate is no sigmoid", chosen + z * shared
    yield "it leaves the shared expert out", chosen
    yield "it leaves the chosen experts out", gated


CHANGED = ChangedOperation(equations=(Equation.ADD_GATED,), changes=changes)
