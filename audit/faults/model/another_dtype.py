"""The whole forward, or the logits alone, in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ....model.checkpoint import DTYPES
from ....model.decoder import Decoder
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The other compute dtypes, and logits in fp32."""
    scorer = evidence.scorer
    for name, scores in evidence.by_dtype.items():
        if DTYPES[name] != scorer.dtype:
            yield Prediction(f"the sampler computed in {name}", scores)
    if scorer.head != torch.float32 and scorer.has_decoder:
        model = scorer.model()
        numerics = model.numerics._replace(lm_head=torch.float32)
        decoder = Decoder(model.config, model.flat.detach(), model.layout, numerics)
        yield Prediction("the sampler's logits are in float32", decoder_scores(decoder, evidence))


def fp32_where_bf16_is_said(w: World) -> Log:
    """A sampler in fp32, and an audit that scores in bf16."""
    lines = w.drawn(model=w.fp32)
    return w.log(lines, options={"dtype": "bfloat16"})


FAULT = Predicted(
    name="another dtype",
    order=310,
    predict=predict,
    remedy="Give both the same dtype, or correct for the difference (importance sampling).",
    tries="the other compute dtypes, and logits in fp32",
    is_rounding=True,
    plants=(Plant(group="weights", make=fp32_where_bf16_is_said),),
)
