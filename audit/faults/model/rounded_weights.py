"""Weights in a narrower dtype than the trainer's, under its own forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ....model.sampler_weights import rounded_weights
from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_weights
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """bf16 and fp16.

    A merge of an adapter in bf16 leaves such weights, and so does a sync in a narrower dtype.
    """
    decoder = evidence.scorer.model()
    exact = decoder.flat.detach()
    for name in ("bfloat16", "float16"):
        rounded = rounded_weights(decoder.layout, exact, name)
        if not torch.equal(rounded, exact):
            yield Prediction(
                f"the sampler's weights are rounded to {name}, the trainer's are not",
                decoder_scores(with_weights(evidence, rounded), evidence),
            )


def a_sync_in_bf16(w: World) -> Log:
    """An engine in fp32 whose weights came in bf16."""
    return w.sampler(w.changed(lambda name, x: x.bfloat16().float(), dtype=w.exact))


FAULT = Predicted(
    name="weights rounded",
    order=290,
    predict=predict,
    needs_decoder=True,
    remedy="Merge adapters and sync weights in the trainer's dtype, or score with the rounded weights too.",
    tries="bf16 or fp16 weights under an fp32 forward, as a merge of an adapter in bf16 leaves them",
    known_from=("huggingface/trl#6688",),
    is_rounding=True,
    perturb=("round_weights",),
    plants=(Plant(group="weights", make=a_sync_in_bf16),),
)
