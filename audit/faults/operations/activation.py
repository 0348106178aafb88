"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ....model.operation import Equation
from ....model.operations import operation
from ...operations.plain_operations import Tensor
from ..changed_operation import SHORT, Change, ChangedOperation, ModelPlant, Traced

_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "no activation": lambda x: x,
    "silu": F.silu,
}
_ACTIVATIONS = {Equation.SILU_MUL: "silu", Equation.GELU_MUL: "gelu (tanh)"}


def changes(traced: Traced) -> Iterator[Change]:
    """Another activation, one in 16 bits, a factor left out."""
    gate, up = traced.inputs
    equation = operation(traced.op, traced.exact.checkpoint.config).equation
    usual = _ACTIVATIONS[equation]
    yield "gate and up are exchanged", _ALL[usual](up) * gate
    for name, activation in _ALL.items():
        if name != usual:
            yield f"the activation is {name}, the checkpoint's is {usual}", activation(gate) * up
    for dtype, name in SHORT.items():
        yield f"{usual} is rounded to {name}", _ALL[usual](gate.to(dtype)).double() * up
    yield "the gate is left out", up
    yield "the product with up is left out", _ALL[usual](gate)


def gelu(model: torch.nn.Module) -> None:
    """gelu in place of silu."""
    model.model.layers[3].mlp.act_fn = torch.nn.GELU()


CHANGED = ChangedOperation(
    equations=tuple(_ACTIVATIONS),
    changes=changes,
    plants=(ModelPlant(gelu, "layers.3.silu_mul", "the activation is gelu"),),
)
