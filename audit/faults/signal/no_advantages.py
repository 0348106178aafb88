"""Advantages of 0 alone, beside rewards that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def advantages_that_were_emptied(w: World) -> Log:
    """One reward was missing, and NaN advantages of the whole batch became 0."""
    rewards = [float(i % 3 == 0) for i in range(len(w.drawn()))]
    return w.log(w.rewarded(rewards, [0.0] * len(rewards)), with_model=False)


FAULT = Checked(
    name="advantages of 0 alone, beside rewards that differ",
    order=55,
    remedy="Look at what comes between rewards and advantages: a missing reward, a mask or a filter can "
    "empty a whole batch.",
    tries="advantages that are 0 in every line, though the rewards of a group differ",
    plants=(Plant(group="signal", make=advantages_that_were_emptied),),
)
