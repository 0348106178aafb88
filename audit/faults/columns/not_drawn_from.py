"""A sampler's column that the tokens were not drawn from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_column_of_another_distribution(w: World) -> Log:
    """A sampler that reports the probabilities of a temperature that nobody set."""
    return w.log(w.both(w.drawn(reported=replace(w.usual, temperature=1.7))), with_model=False)


FAULT = Checked(
    name="distribution",
    order=40,
    remedy="Let the sampler report processed log-probabilities (vLLM: "
    "logprobs_mode='processed_logprobs'), and write the temperature, top_p and top_k that it drew with "
    "into the log.",
    tries="a trainer's column that explains the drawn tokens better than the sampler's own, and completions "
    "of one prompt that draw the same token more often, or less, than the column says",
    plants=(Plant(group="settings", make=a_column_of_another_distribution),),
)
