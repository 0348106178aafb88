"""Advantages that are NaN, infinite or null beside a drawn token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_group_divided_by_zero(w: World) -> Log:
    """A group of equal rewards, whose advantages were divided by their deviation of 0."""
    rewards = [float(i % 3 == 0 and i > 2) for i in range(len(w.drawn()))]
    advantages = ["NaN" if i < 3 else r - 1.0 / 3.0 for i, r in enumerate(rewards)]
    return w.log(w.rewarded(rewards, advantages), with_model=False)


FAULT = Checked(
    name="advantages that are no numbers",
    order=30,
    remedy="Look at the rewards of their groups: one is NaN, or all are equal, and 0 divides.",
    tries="advantages that are NaN, infinite or null beside a drawn token",
    plants=(Plant(group="signal", make=a_group_divided_by_zero),),
)
