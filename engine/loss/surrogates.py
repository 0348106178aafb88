"""How far the staleness ratio r = pi / old counts: a registry of bounds. f A is what the loss has in place of
r A.

    none         f A = r A
    clip         f A = min(r A, clip(r, low, high) A)          (PPO, arXiv:1707.06347)
    truncate     f A = min(r, high) A
    mask         f A = r A where low <= r <= high, else 0
    clip_weight  f A = sg(clip(r, low, high)) A logp           (CISPO, arXiv:2506.13585)

A surrogate returns the value f A and its slope, the derivative by logp. Autograd never multiplies an infinite
ratio by 0 that way. Every token's value and slope are its own. `loss.surrogate = "module:function"` names one
of the user's own.

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
    """PPO's: the lesser of the plain and the clipped ratio times A; the clipped one has no slope."""
    plain, clipped = r * A, torch.clamp(r, low, high) * A
    return torch.minimum(plain, clipped), torch.where(plain <= clipped, plain, 0.0)


def truncate(r, A, logp, low, high):
    """A ratio above `high` counts as `high`, without a slope."""
    return torch.clamp(r, max=high) * A, torch.where(r <= high, r * A, 0.0)


def mask(r, A, logp, low, high):
    """A token whose ratio is out of bounds does not count."""
    kept = torch.where((r >= low) & (r <= high), r * A, 0.0)
    return kept, kept


def clip_weight(r, A, logp, low, high):
    """REINFORCE with the clipped ratio as a constant weight."""
    weight = torch.clamp(r, low, high) * A
    return torch.where(weight == 0, 0.0, weight * logp), weight


# loss.bound -> its function. low = 1 - loss.clip_low, high = 1 + loss.clip_high. Where A is 0 a result may be
# anything.
BOUNDS: dict[str, Surrogate] = {
    "none": unbounded,
    "clip": clip,
    "truncate": truncate,
    "mask": mask,
    "clip_weight": clip_weight,
}
