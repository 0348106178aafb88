"""One column of the raw logits beside one of the declared temperature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..fault import Checked, Plant

if TYPE_CHECKING:
    from ..planting.world import Log, World


def a_trainer_without_the_temperature(w: World) -> Log:
    """A trainer that does not divide its logits, of a model that is sure of many tokens."""
    model = w.changed(lambda name, x: 3.0 * x if name == "model.norm.weight" else None, dtype=w.exact)
    low = replace(w.usual, temperature=0.6)
    return w.log(w.both(w.drawn(low, model), w.raw, model), low, with_model=False)


FAULT = Checked(
    name="{side} without the temperature",
    order=20,
    remedy="Let the sampler report processed log-probabilities (vLLM: "
    "logprobs_mode='processed_logprobs'), and write the temperature, top_p and top_k that it drew with "
    "into the log.",
    trainer_remedy="Let the trainer compute log-probabilities of the distribution that was drawn from: "
    "divide its logits by the temperature, then apply the same top-p and top-k, renormalised.",
    tries="one column that is the other at the declared temperature",
    plants=(
        Plant(group="settings", make=a_trainer_without_the_temperature, named=("without the temperature",)),
    ),
)
