"""AdamW's update of the master weights, in one pass on a GPU.

    g = scale dL         m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
    w = w - lr (m / c1) / (sqrt(v / c2) + eps)         c = 1 - beta^updates

Source: Loshchilov & Hutter, arXiv:1711.05101, without the decay of the weights, which comes before.

Shapes: all tensors [n] fp32; `out` [n] in the compute dtype.
Roundings: after every operation above, in the order in which the reference writes them. No product is fused
with a sum. The new weights are rounded once to the dtype of `out`. Triton rounds each operation exactly. The
reference's square root is torch's, which on a CPU is MKL's: one unit in the last place off for 17% of fp32
numbers (order.py). All else is equal to the bit.
Order: no sums over elements.
"""

from typing import NamedTuple

import torch

from .backend import on_triton

# Elements of one turn of the reference: a temporary has 1 MiB and so stays in the cache (benchmarks/LOG.md).
_SLICE = 1 << 18


class AdamW(NamedTuple):
    """The numbers of one update."""

    grad_scale: float
    lr: float
    beta1: float
    beta2: float
    correction1: float  # 1 - beta1^updates
    correction2: float
    eps: float


def adamw_ref(
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
    out: torch.Tensor | None = None,
) -> None:
    """The reference of adamw."""
    a = numbers
    for start in range(0, master.numel(), _SLICE):
        part = slice(start, min(start + _SLICE, master.numel()))
        g, m, v = grad[part] * a.grad_scale, first[part], second[part]
        m.mul_(a.beta1).add_(g * (1.0 - a.beta1))
        v.mul_(a.beta2).add_(g * g * (1.0 - a.beta2))
        step = (m / a.correction1).div_((v / a.correction2).sqrt_().add_(a.eps)).mul_(a.lr)
        master[part].sub_(step)
    if out is not None:
        out.copy_(master)


def adamw(
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
    out: torch.Tensor | None = None,
) -> None:
    """Update master weights and moments in place, and write the rounded weights to `out`.

    master, first, second [n] fp32; grad [n or more] fp32, of which the first n count; out [n] or None.
    """
    if on_triton(master):
        from .adamw_triton import adamw as adamw_triton

        adamw_triton(master, first, second, grad, numbers, out)
    else:
        adamw_ref(master, first, second, grad, numbers, out)
