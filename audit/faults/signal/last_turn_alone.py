"""Conversations whose advantage stands beside their last turn alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def an_advantage_for_the_last_turn(w: World) -> Log:
    """A trainer that gives the advantage of a conversation to its last turn."""
    log = w.conversations(lambda prompt, completion, question: [*prompt, *completion, *w.newline, *question])
    for i, line in enumerate(log.lines):
        first, last = line.extra["turns"]
        first["advantage"], last["advantage"] = 0.0, float(i % 3) - 0.5
        line.extra["reward"] = float(i % 3)
    return w.log(log.lines, with_model=False)


FAULT = Checked(
    name="advantages in the last turn alone",
    order=40,
    remedy="Spread a completion's advantage over every token that it drew.",
    tries="conversations of several turns, all of whose turns but the last have the advantage 0",
    plants=(Plant(group="signal", make=an_advantage_for_the_last_turn),),
)
