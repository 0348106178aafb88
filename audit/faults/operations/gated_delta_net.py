"""A gated delta net: its convolution, its rule, its gated norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ....kernels.recurrent_state import StateShape
from ....model.operation import Equation
from ....model.operations import input_names, operation, split_name
from ...operations import plain_delta_net as plain
from ...operations.plain_operations import Operations, Tensor
from ..changed_operation import Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """A part left out, or in another order; of a gated norm, also of what transformers shows no output of."""
    exact, layer = traced.exact, split_name(traced.op)[0]
    c, (net, weight) = exact.checkpoint.config, exact.delta_net(traced.op)

    def inputs(name: str, equation: Equation) -> list[Tensor]:
        rows = [traced.lookup(x).double() for x in input_names(f"{layer}{name}", c)]
        return plain.operands(equation, net, rows)

    equation = operation(traced.op, c).equation
    (x,), taps = inputs("conv", Equation.CONV_SILU), weight("conv1d.weight")
    qkv, *gates = inputs("delta_rule", Equation.DELTA_RULE)
    numbers = weight("A_log"), weight("dt_bias"), net.shape
    if equation is Equation.CONV_SILU:
        yield from _convolutions(x, taps)
    elif equation is Equation.DELTA_RULE:
        yield from _rules(qkv, *gates, *numbers)
    else:
        o, z = inputs("gated_norm", equation)
        w = weight("norm.weight")
        yield from _gated_norms(exact, o, z, w)
        for words, other in _rules(qkv, *gates, *numbers):
            yield words, plain.gated_norm(other, z, w, c.eps)
        for words, other in _convolutions(x, taps):
            yield words, plain.gated_norm(plain.delta_rule(other, *gates, *numbers), z, w, c.eps)


def _convolutions(x: Tensor, w: Tensor) -> Iterator[Change]:
    now = torch.zeros_like(w)
    now[..., -1] = w[..., -1]
    yield "its taps are in the opposite order", plain.conv_silu(x, w.flip(-1))
    yield "it reads no earlier token", plain.conv_silu(x, now)
    y = F.conv1d(F.pad(x.t(), (w.shape[-1] - 1, 0)).unsqueeze(0), w, groups=len(w))[0].t()
    yield "silu is left out", y


def _rules(
    qkv: Tensor, b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, s: StateShape
) -> Iterator[Change]:
    yield (
        "queries are not divided by the root of their width",
        (plain.delta_rule(qkv, b, a, A_log, dt_bias, s) * s.K**0.5),
    )
    yield "dt_bias is left out", plain.delta_rule(qkv, b, a, A_log, torch.zeros_like(dt_bias), s)
    yield "the state does not decay", plain.delta_rule(qkv, b, a, A_log - torch.inf, dt_bias, s)
    yield "beta is left out", plain.delta_rule(qkv, torch.full_like(b, torch.inf), a, A_log, dt_bias, s)
    yield "a and b are exchanged", plain.delta_rule(qkv, a, b, A_log, dt_bias, s)


def _gated_norms(exact: Operations, o: Tensor, z: Tensor, w: Tensor) -> Iterator[Change]:
    eps = exact.checkpoint.config.eps
    yield "the gate is left out", exact.norm(o, w, eps)
    yield "the gate is a sigmoid, and not silu", exact.norm(o, w, eps) * torch.sigmoid(z)
    yield "the weight is applied as 1 + weight", plain.gated_norm(o, z, 1 + w, eps)
    yield "the gate comes before the norm", exact.norm(o * F.silu(z), w, eps)


def taps_turned(model: torch.nn.Module) -> None:
    """The taps of a convolution in the opposite order."""
    w = model.model.layers[0].linear_attn.conv1d.weight
    w.copy_(w.flip(-1))


def no_dt_bias(model: torch.nn.Module) -> None:
    """A bias that was not loaded."""
    model.model.layers[0].linear_attn.dt_bias.zero_()


CHANGED = ChangedOperation(
    equations=(Equation.CONV_SILU, Equation.DELTA_RULE, Equation.GATED_NORM),
    changes=changes,
    plants=(
        ModelPlant(taps_turned, "layers.0.gated_norm", "its taps are in the opposite order"),
        ModelPlant(no_dt_bias, "layers.0.gated_norm", "dt_bias is left out"),
    ),
)
