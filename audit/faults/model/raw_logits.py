"""Log-probabilities of the raw logits: no temperature, no cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ....kernels.sampling_params import SamplingParams
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import under
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Log-softmax of the logits as the model gives them."""
    scores = under(evidence, evidence.scorer.model(), lambda p: SamplingParams())
    if scores:
        what = "the logged log-probabilities are of the raw logits: temperature 1, nothing cut"
        yield Prediction(what, scores)


def sampler_raw_logits(w: World) -> Log:
    """A sampler that draws at its temperature and reports what the model gave."""
    return w.log(w.both(w.drawn(reported=w.raw, settings=w.usual)))


def trainer_without_temperature(w: World) -> Log:
    """A trainer that does not divide by the temperature."""
    return w.log(w.both(w.drawn(), w.raw))


def trainer_without_temperature_no_model(w: World) -> Log:
    """The same, by its two columns."""
    return w.log(w.both(w.drawn(), w.raw), with_model=False)


def trainer_without_bias(w: World) -> Log:
    """A trainer that does not know the logit bias of the requests."""
    s = replace(w.usual, bias=((int(w.rng.integers(60, 120)), w.uniform(1.5, 3.0)),))
    return w.log(w.both(w.drawn(s), w.usual), s)


_TRAINER = ("trainer without the temperature", "trainer column, raw logits", "trainer column, another temp")
_BIAS = ("trainer column, logit bias", "logit bias", "trainer column, raw logits")

FAULT = Predicted(
    name="raw logits",
    order=20,
    predict=predict,
    remedy="Let the sampler report processed log-probabilities (vLLM: logprobs_mode='processed_logprobs'), "
    "and apply the same temperature, top-p and top-k in the trainer.",
    tries="all parts of the distribution are left out",
    known_from=("huggingface/trl#4159",),
    is_at_once=True,
    plants=(
        Plant(group="column", make=trainer_without_temperature, named=_TRAINER),
        Plant(
            group="column",
            make=trainer_without_temperature_no_model,
            named=_TRAINER[:1],
            untold="two columns tell it where enough tokens are likelier than 1/2",
        ),
        Plant(group="column", make=sampler_raw_logits),
        Plant(group="column", make=trainer_without_bias, named=_BIAS),
    ),
)
