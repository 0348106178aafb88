"""The adapter of another step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....model.checkpoint import stored_dtype
from ...hypotheses.adapters import base_weights, merge_into, predicted, read
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted
from ..planting.adapters import log_of, with_products, written

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The other adapters that were named, one by one."""
    named = evidence.scorer.adapters
    for folder in named.others if named else ():
        flat, adapter = base_weights(evidence), read(evidence, folder)
        merge_into(evidence, flat, adapter, adapter.lora.scale, stored_dtype(evidence.scorer.folder))
        yield predicted(evidence, f"the sampler computed with the adapter {folder}", flat)


def an_adapter_of_another_step(w: World) -> Log:
    """An engine that serves the adapter of the step before."""
    adapter, before = written(w), written(w, "adapter-before", 1)
    return log_of(w, with_products(w, before.products), adapter, before)


FAULT = Predicted(
    name="another adapter",
    order=250,
    predict=predict,
    needs_decoder=True,
    remedy="Sync the adapter before each draw: compare its version in the sampler with the trainer's.",
    tries="the other adapters that `--adapter` names, such as a run's checkpoints",
    plants=(Plant(group="weights", make=an_adapter_of_another_step),),
)
