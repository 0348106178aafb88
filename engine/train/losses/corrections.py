"""Corrections of the mismatch between trainer and sampler: a registry.

A correction makes a weight c of the mismatch ratio old / mu. c multiplies a token's loss as a constant.

    none      c = 1: the mismatch is ignored
    full      c = ratio                                                            (importance sampling)
    truncate  c = min(ratio, correction_high)                                      (TIS)
    mask      c = ratio where correction_low <= ratio <= correction_high, else 0   (MIS, IcePop)

Shapes: C tokens; ratio, c [C] fp32.
"""

from collections.abc import Callable

import torch

Correction = Callable[[torch.Tensor, float, float], torch.Tensor]


def ignore(ratio, low, high):
    """1 for every ratio."""
    return torch.ones_like(ratio)


def full(ratio, low, high):
    """The ratio as it is."""
    return ratio


def truncate(ratio, low, high):
    """A ratio above `high` counts as `high`."""
    return torch.clamp(ratio, max=high)


def mask(ratio, low, high):
    """A ratio out of bounds counts as 0."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# loss.correction -> its function. low = loss.correction_low, high = loss.correction_high.
CORRECTIONS: dict[str, Correction] = {"none": ignore, "full": full, "truncate": truncate, "mask": mask}
