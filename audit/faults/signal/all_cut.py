"""Completions that a limit cut, all of them, and no signal among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_limit_that_is_too_low(w: World) -> Log:
    """No completion comes to its answer, so no reward is above 0."""
    zeros = [0.0] * len(w.drawn())
    lines = w.rewarded(zeros, zeros)
    for line in lines:
        line.extra["finish_reason"] = "length"
    return w.log(lines, with_model=False)


FAULT = Checked(
    name="all completions cut, and no signal",
    order=60,
    remedy="Raise the limit of tokens, or choose prompts that the model answers within it.",
    tries="completions that all were cut, with rewards or advantages of 0 alone",
    plants=(Plant(group="signal", make=a_limit_that_is_too_low),),
)
