"""Bounds of the staleness ratio r = pi / old: a registry.

A bound makes f of the ratio. The loss has f A in place of r A.

    none         f A = r A
    clip         f A = min(r A, clip(r, low, high) A)          (PPO, arXiv:1707.06347)
    truncate     f A = min(r, high) A
    mask         f A = r A where low <= r <= high, else 0
    clip_weight  f A = sg(clip(r, low, high)) A logp           (CISPO, arXiv:2506.13585)

A surrogate returns the value f A and its slope, which is the derivative by logp. So autograd never multiplies
an infinite ratio by 0. The value and slope of a token depend on that token only.
`loss.surrogate = "module:function"` names a surrogate of the user's.

Shapes: C tokens; r, A, logp, value, slope [C] fp32.
"""

from collections.abc import Callable

import torch

Surrogate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]
]


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


def clip_weight(r, A, logp, low, high):
    """REINFORCE with the clipped ratio as a constant weight."""
    weight = torch.clamp(r, low, high) * A
    return torch.where(weight == 0, 0.0, weight * logp), weight


# loss.bound -> its function. low = 1 - loss.clip_low, high = 1 + loss.clip_high. Where A is 0, a function may
# return anything: policy_loss sets the result to 0.
BOUNDS: dict[str, Surrogate] = {
    "none": unbounded,
    "clip": clip,
    "truncate": truncate,
    "mask": mask,
    "clip_weight": clip_weight,
}
