"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ....model.operation import Equation
from ...operations.operations import Tensor
from ..changed_operation import SHORT, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """Another activation, one in 16 bits, a factor left out."""
    gate, up = traced.inputs
    yield "gate and up are exchanged", F.silu(up) * gate
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "no activation": lambda x: x,
    }
    for name, activation in activations.items():
        yield f"the activation is {name}, the checkpoint's is silu", activation(gate) * up
    for dtype, name in SHORT.items():
        yield f"silu is rounded to {name}", F.silu(gate.to(dtype)).double() * up
    yield "the gate is left out", up
    yield "the product with up is left out", F.silu(gate)


def gelu(model: torch.nn.Module) -> None:
    """gelu in place of silu."""
    model.model.layers[3].mlp.act_fn = torch.nn.GELU()


CHANGED = ChangedOperation(
    equations=(Equation.SILU_MUL,),
    changes=changes,
    plants=(ModelPlant(gelu, "layers.3.silu_mul", "the activation is gelu"),),
)
