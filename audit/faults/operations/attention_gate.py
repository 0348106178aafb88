"""The gate of attention, which lies beside the queries of each head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ..changed_operation import Change, ChangedOperation, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """The gate left out or taken as it is, or the half of each head's rows that are its queries."""
    attended, projected = traced.inputs
    queries, gate = traced.exact.query_and_gate(projected)
    yield "the gate is left out", attended
    yield "the gate is no sigmoid", attended * gate
    yield "the first half of each head's rows is taken for its gate", attended * torch.sigmoid(queries)


CHANGED = ChangedOperation(equations=(Equation.MUL_SIGMOID,), changes=changes)
