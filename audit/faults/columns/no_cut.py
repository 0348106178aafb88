"""One column without the cut of the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_trainer_without_the_top_p(w: World) -> Log:
    """A trainer that does not cut."""
    cut = replace(w.usual, top_p=0.8)
    return w.log(w.both(w.drawn(cut), w.usual), cut, with_model=False)


FAULT = Checked(
    name="{side} without {cut}",
    order=30,
    remedy="Let the sampler report processed log-probabilities (vLLM: "
    "logprobs_mode='processed_logprobs'), and write the temperature, top_p and top_k that it drew with "
    "into the log.",
    trainer_remedy="Let the trainer compute log-probabilities of the distribution that was drawn from: "
    "divide its logits by the temperature, then apply the same top-p and top-k, renormalised.",
    tries="one column that is the other, cut by top-p, top-k or min-p and renormalised",
    plants=(Plant(group="settings", make=a_trainer_without_the_top_p, named=("without top-p",)),),
)
