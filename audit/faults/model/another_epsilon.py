"""Another epsilon in all norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_config
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_EPSILONS = (1e-5, 1e-6, 1e-8)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The usual ones."""
    eps_of_model = evidence.scorer.model().config.eps
    for eps in _EPSILONS:
        if eps != eps_of_model:
            what = f"the epsilon of the sampler's norms is {eps:g}, the checkpoint's {eps_of_model:g}"
            yield with_config(evidence, what, eps=eps)


def an_epsilon_of_another_family(w: World) -> Log:
    """An engine in fp32 that has Llama's epsilon in a Qwen, or the reverse."""
    eps = 1e-5 if w.fp32.config.rms_norm_eps == 1e-6 else 1e-6
    return w.sampler(w.model(dtype=w.exact, rms_norm_eps=eps))


FAULT = Predicted(
    name="another epsilon",
    order=350,
    predict=predict,
    needs_decoder=True,
    remedy="Compare rms_norm_eps of both configurations.",
    tries="usual epsilons",
    plants=(Plant(group="attention", make=an_epsilon_of_another_family),),
)
