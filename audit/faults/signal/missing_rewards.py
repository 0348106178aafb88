"""Completions without a reward, in a log that has rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_line_without_reward(w: World) -> Log:
    """A judge that gave no answer once."""
    lines = w.rewarded([float(i % 3 == 0) for i in range(len(w.drawn()))])
    del lines[4].extra["reward"]
    return w.log(lines, with_model=False)


FAULT = Checked(
    name="missing rewards",
    order=10,
    remedy="Look at what scored these completions, and leave out a group that has no rewards.",
    tries="completions without a reward, beside others that have one",
    plants=(Plant(group="signal", make=a_line_without_reward),),
)
