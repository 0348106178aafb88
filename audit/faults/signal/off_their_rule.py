"""Advantages that do not follow the rule which most of the log follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def advantages_of_the_lines_before(w: World) -> Log:
    """A sort that moved the advantages of two groups by one line."""
    rewards = [float(i % 3 == 0) for i in range(len(w.drawn()))]
    advantages = [r - 1.0 / 3.0 for r in rewards]
    for start in (0, 6):
        advantages[start : start + 3] = [advantages[start + 2], *advantages[start : start + 2]]
    return w.log(w.rewarded(rewards, advantages), with_model=False)


FAULT = Checked(
    name="advantages that do not follow the rewards",
    order=50,
    remedy="Compute advantages over whole groups, before these are cut into micro-batches or turns, and "
    "keep each beside its completion.",
    tries="advantages that break the rule of most, beside others of their groups with the same reward, or "
    "with the opposite sign",
    plants=(Plant(group="signal", make=advantages_of_the_lines_before),),
)
