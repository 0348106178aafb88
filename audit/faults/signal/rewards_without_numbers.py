"""Rewards that are NaN or infinite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_reward_that_is_nan(w: World) -> Log:
    """A score of 0 / 0."""
    rewards = ["NaN" if i == 4 else float(i % 3 == 0) for i in range(len(w.drawn()))]
    return w.log(w.rewarded(rewards), with_model=False)


FAULT = Checked(
    name="rewards that are no numbers",
    order=20,
    remedy="Look at what scored these completions, and leave out a group that has no rewards.",
    tries="rewards that are NaN or infinite",
    plants=(Plant(group="signal", make=a_reward_that_is_nan),),
)
