"""A gated delta net: its convolution, its rule, its gated norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ....model.operation import Equation
from ....model.operations import operation
from ...operations import plain_delta_net as plain
from ...operations.plain_operations import Tensor
from ..changed_operation import Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """A part left out, or in another order."""
    exact = traced.exact
    c, (net, weight) = exact.checkpoint.config, exact.delta_net(traced.op)
    equation = operation(traced.op, c).equation
    x = plain.operands(equation, net, traced.inputs)
    if equation is Equation.CONV_SILU:
        yield from _other_convolutions(*x, weight("conv1d.weight"))
    elif equation is Equation.DELTA_RULE:
        qkv, b, a = x
        A_log, dt_bias, ones = weight("A_log"), weight("dt_bias"), torch.full_like(b, torch.inf)
        rule = (qkv, b, a, A_log, dt_bias, net.shape)
        yield "queries are not divided by the root of their width", plain.delta_rule(*rule) * net.shape.K**0.5
        yield "dt_bias is left out", plain.delta_rule(qkv, b, a, A_log, 0 * dt_bias, net.shape)
        yield "the state does not decay", plain.delta_rule(qkv, b, a, A_log - torch.inf, dt_bias, net.shape)
        yield "beta is left out", plain.delta_rule(qkv, ones, a, A_log, dt_bias, net.shape)
        yield "a and b are exchanged", plain.delta_rule(qkv, a, b, A_log, dt_bias, net.shape)
    else:
        o, z = x
        w = weight("norm.weight")
        yield "the gate is left out", exact.norm(o, w, c.eps)
        yield "the gate is a sigmoid, and not silu", exact.norm(o, w, c.eps) * torch.sigmoid(z)
        yield "the weight is applied as 1 + weight", plain.gated_norm(o, z, 1 + w, c.eps)
        yield "the gate comes before the norm", exact.norm(o * F.silu(z), w, c.eps)


def _other_convolutions(x: Tensor, w: Tensor) -> Iterator[Change]:
    now = torch.zeros_like(w)
    now[..., -1] = w[..., -1]
    yield "its taps are in the opposite order", plain.conv_silu(x, w.flip(-1))
    yield "it reads no earlier token", plain.conv_silu(x, now)
    y = F.conv1d(F.pad(x.t(), (w.shape[-1] - 1, 0)).unsqueeze(0), w, groups=len(w))[0].t()
    yield "silu is left out", y


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
        ModelPlant(taps_turned, "layers.0.conv", "its taps are in the opposite order"),
        ModelPlant(no_dt_bias, "layers.0.delta_rule", "dt_bias is left out"),
    ),
)
