"""The operations of a gated delta net with plain torch, token after token. See plain_operations.py.

Shapes: T tokens; others as in kernels/delta_rule.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...kernels.recurrent_state import StateShape
from ...model.blocks.delta_net import DeltaNet
from ...model.operation import Equation

Tensor = torch.Tensor


def conv_silu(x: Tensor, w: Tensor) -> Tensor:
    """silu of the causal convolution of x [T, C] with w [C, 1, taps]."""
    padded = F.pad(x.t(), (w.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded.unsqueeze(0), w, groups=len(w))[0].t())


def delta_rule(qkv: Tensor, b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, s: StateShape) -> Tensor:
    """o [T, H V] of qkv [T, C], b and a [T, H]."""
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(qkv.split(s.widths, 1), (s.K, s.K, s.V), strict=True))
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(s.heads // s.key_heads, 1)
        for x in (q, k)
    )
    decay, beta = torch.exp(-A_log.exp() * F.softplus(a + dt_bias)), torch.sigmoid(b)
    state, rows = qkv.new_zeros(s.heads, s.K, s.V), []
    for t in range(len(qkv)):
        state = state * decay[t].view(-1, 1, 1)
        u = (v[t] - (state * k[t].unsqueeze(2)).sum(1)) * beta[t].unsqueeze(1)
        state = state + k[t].unsqueeze(2) * u.unsqueeze(1)
        rows.append((state * q[t].unsqueeze(2)).sum(1) * s.K**-0.5)
    return torch.stack(rows).flatten(1)


def gated_norm(o: Tensor, z: Tensor, w: Tensor, eps: float) -> Tensor:
    """norm(o) w silu(z) of each head. o, z [T, H V], w [V]."""
    heads = o.unflatten(1, (-1, len(w)))
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return (heads * scale * w * F.silu(z.view(heads.shape))).flatten(1)


def operands(equation: Equation, net: DeltaNet, x: list[Tensor]) -> list[Tensor]:
    """What an operation reads of the outputs before it, where some lie in one tensor."""
    match equation:
        case Equation.CONV_SILU:
            return [net.split_qkvz(x[0])[0]] if net.fused_names else x
        case Equation.DELTA_RULE:
            return [x[0], *(net.split_ba(x[1]) if net.fused_names else x[1:])]
        case _:
            return [x[0], net.split_qkvz(x[1])[1] if net.fused_names else x[1]]


def compute(
    equation: Equation, net: DeltaNet, x: list[Tensor], weight: Callable[[str], Tensor], eps: float
) -> Tensor:
    """An operation of a gated delta net from what it reads. weight: by its name in the module."""
    x = operands(equation, net, x)
    match equation:
        case Equation.CONV_SILU:
            return conv_silu(*x, weight("conv1d.weight"))
        case Equation.DELTA_RULE:
            return delta_rule(*x, weight("A_log"), weight("dt_bias"), net.shape)
        case _:
            return gated_norm(*x, weight("norm.weight"), eps)
