"""The slope of a user's surrogate against central finite differences of its value, before a run begins.

With x = logp and r = exp(x - old), a step h in x moves r to r exp(h):

    slope = d value / d x = (value(x + h) - value(x - h)) / (2 h) + O(h^2)

All of it is fp64. The argument r_detached stays at r: what a surrogate takes from it is left out of the
derivative, on both sides of the comparison. The ratios lie below, at and above 1, each with a good and a bad
completion. 1 is the ratio of every first update. The others are no round numbers, so that no usual bound is
there. Where the value has a kink all the same (PPO's clip with both bounds at 1), every slope between the two
one-sided ones is right.

Shapes: n points; r, A, logp, value, slope [n] fp64.
"""

import torch

from ...config.loss_section import LossConfig
from .policy_loss import surrogate
from .surrogates import Surrogate

_RATIOS, _ADVANTAGES, _LOGP = (0.67, 1.0, 1.43), (0.75, -1.25), -1.2
# The error of the difference is h^2 / 6 times the third derivative, and 1e-16 / h of the value: 2e-11 each.
_STEP = 1e-5
# Shares of the slope or value, whichever is larger. A slope that is wrong by a thousandth is refused, and a
# third derivative of 100,000 is not. One-sided slopes of a smooth value differ by h times the second
# derivative: a larger difference is a kink.
_TOLERANCE, _KINK = 1e-5, 1e-2


def check_surrogate(cfg: LossConfig, directory: str = "") -> None:
    """Raise ValueError where a user's surrogate returns a slope that is not the derivative of its value.

    cfg: resolved. directory: see policy_loss. A bound of our own is not checked here, but by the tests.
    """
    if cfg.surrogate:
        bounds = 1.0 - cfg.clip_low, 1.0 + cfg.clip_high
        check_slope(surrogate(cfg, directory), *bounds, f"loss.surrogate: {cfg.surrogate}")


def check_slope(function: Surrogate, low: float, high: float, what: str) -> None:
    """Raise ValueError that names ratio, advantage, expected and returned slope of the first wrong one."""
    r, A = (x.flatten() for x in torch.meshgrid(_fp64(_RATIOS), _fp64(_ADVANTAGES), indexing="ij"))
    logp = torch.full_like(r, _LOGP)

    def at(step: float) -> tuple[torch.Tensor, torch.Tensor]:
        return function(r * torch.exp(_fp64(step)), A, logp + step, low, high, r)

    (value, slope), before, after = at(0.0), at(-_STEP)[0], at(_STEP)[0]
    central = (after - before) / (2 * _STEP)
    left, right = (value - before) / _STEP, (after - value) / _STEP
    scale = torch.stack([value.abs(), slope.abs(), central.abs(), A.abs()]).amax(0)
    kinked = (right - left).abs() > _KINK * scale
    between = (slope >= torch.minimum(left, right) - _KINK * scale) & (
        slope <= torch.maximum(left, right) + _KINK * scale
    )
    right_slope = torch.where(kinked, between, (slope - central).abs() <= _TOLERANCE * scale)
    for i in (~right_slope).nonzero().flatten().tolist():
        raise ValueError(
            f"{what} returned the slope {slope[i]:.6g} at ratio {r[i]:g} and advantage {A[i]:g}, where "
            f"finite differences of its value give {central[i]:.6g}; correct the slope, or take a ratio that "
            "is to have no gradient from the argument r_detached (docs/extend.md)"
        )


def _fp64(x: object) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)
