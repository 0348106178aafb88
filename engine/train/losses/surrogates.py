"""Bounds of the staleness ratio r = pi / old: a registry.

A bound makes f of the ratio. The loss has f A in place of r A.

    none         f A = r A
    clip         f A = min(r A, clip(r, low, high) A)          (PPO, arXiv:1707.06347)
    truncate     f A = min(r, high) A
    mask         f A = r A where low <= r <= high, else 0
    clip_weight  f A = sg(clip(r, low, high)) A logp           (CISPO, arXiv:2506.13585)

A surrogate returns the value f A and its slope, which is the derivative by logp. So autograd never multiplies
an infinite ratio by 0. The value and slope of a token depend on that token only.
`loss.surrogate = "module:function"` names a surrogate of the user's, whose slope surrogate_check.py checks.

A stop-gradient, sg above, is the argument r_detached. It has the numbers of r, and the derivative leaves it
out. A surrogate without a stop-gradient need not take this argument.

Shapes: C tokens; r, A, logp, r_detached, value, slope [C] fp32.
"""

import inspect
from collections.abc import Callable

import torch

Surrogate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, float, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
_DETACHED = "r_detached"


def unbounded(r, A, logp, low, high):
    """The ratio as it is."""
    return r * A, r * A


def clip(r, A, logp, low, high):
    """PPO's clip: the smaller of the plain and the clipped ratio times A. The clipped ratio has no slope."""
    plain, clipped = r * A, torch.clamp(r, low, high) * A
    return torch.minimum(plain, clipped), torch.where(plain <= clipped, plain, 0.0)


def truncate(r, A, logp, low, high):
    """A ratio above `high` counts as `high`, and has no slope."""
    return torch.clamp(r, max=high) * A, torch.where(r <= high, r * A, 0.0)


def mask(r, A, logp, low, high):
    """A token whose ratio is out of bounds does not count."""
    kept = torch.where((r >= low) & (r <= high), r * A, 0.0)
    return kept, kept


def clip_weight(r, A, logp, low, high, r_detached):
    """REINFORCE with the clipped ratio as a constant weight."""
    weight = torch.clamp(r_detached, low, high) * A
    return torch.where(weight == 0, 0.0, weight * logp), weight


# loss.bound -> its function. low = 1 - loss.clip_low, high = 1 + loss.clip_high. Where A is 0, a function may
# return anything: policy_loss sets the result to 0.
BOUNDS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "none": unbounded,
    "clip": clip,
    "truncate": truncate,
    "mask": mask,
    "clip_weight": clip_weight,
}


def with_detached(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Surrogate:
    """`function` with the argument r_detached, whether it takes this argument or not."""
    if _DETACHED in _parameters(function):
        return lambda r, A, logp, low, high, r_detached: function(
            r, A, logp, low, high, r_detached=r_detached
        )
    return lambda r, A, logp, low, high, r_detached: function(r, A, logp, low, high)


def _parameters(function: Callable[..., object]) -> list[str]:
    """The names of a function's parameters; none where a compiled one does not tell them."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


# The same functions, each with the argument r_detached. A loss calls one for every micro-batch, so their
# parameters are looked at once.
SURROGATES: dict[str, Surrogate] = {name: with_detached(function) for name, function in BOUNDS.items()}
