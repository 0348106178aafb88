"""Two surrogates. dual_clip (arXiv:1912.09729, equation 5) is PPO's clip, and a floor under the loss of bad
completions:

    f A = max(min(r A, clip(r, low, high) A), C A)   where A < 0
    f A =     min(r A, clip(r, low, high) A)         elsewhere

Where A < 0, a large ratio r makes r A as negative as it likes; below C A it has no slope any more.

truncated_weight has a ratio without a gradient: f A = sg(min(r, high)) A logp.
Shapes: C tokens; r, A, logp, r_detached, value, slope [C] fp32.
"""

import torch
from zerokl.engine.train.losses.surrogates import clip

FLOOR = 3.0  # the C of the equation; verl's default (clip_ratio_c)


def dual_clip(r, A, logp, low, high):
    """Value f A of each token, and its derivative by the token's logp. d r / d logp is r."""
    value, slope = clip(r, A, logp, low, high)
    floor = FLOOR * A
    below = (A < 0) & (value < floor)
    return torch.where(below, floor, value), torch.where(below, 0.0, slope)


def truncated_weight(r, A, logp, low, high, r_detached):
    """The truncated ratio is a constant weight: it comes from r_detached, and the slope leaves it out."""
    weight = torch.clamp(r_detached, max=high) * A
    return weight * logp, weight
