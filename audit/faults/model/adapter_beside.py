"""The base, and the adapter's product added to each output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ....files.dtypes import dtype_name
from ....model.checkpoint import DTYPES
from ...hypotheses.adapters import NARROW, base_weights, left_by, predicted, read, rounded
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted
from ..planting.adapters import beside, log_of, written

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """A and B are fp32, or of the audit's dtype.

    The base is as it was, or what merging and unmerging the adapter, alone or after the others, has left.
    """
    named = evidence.scorer.adapters
    if not named:
        return
    adapter, history = read(evidence, named.merged), [read(evidence, folder) for folder in named.others]
    for dtype in dict.fromkeys((torch.float32, evidence.scorer.model().dtype)):
        name = dtype_name(dtype)
        what = f"the sampler adds s (x A) B to x W, with A and B in {name}, and nothing is merged"
        yield predicted(evidence, what, base_weights(evidence), rounded(adapter, dtype))
    for name in NARROW:
        for words, adapters in {
            "the adapter": [adapter],
            "all adapters in turn": [*history, adapter],
        }.items():
            what = (
                "the sampler adds s (x A) B to x W, and W is what merging and unmerging "
                f"{words} in {name} left"
            )
            yield predicted(evidence, what, left_by(evidence, adapters, DTYPES[name]), adapter)
            if not history:
                break


def unmerged_in_bf16(w: World) -> Log:
    """An engine in fp32 that adds s (x A) B to x W, and W is what one merge in bf16 and back has left."""
    adapter = written(w)
    return log_of(w, beside(w, adapter), adapter)


FAULT = Predicted(
    name="adapter beside the weights",
    order=280,
    predict=predict,
    needs_decoder=True,
    remedy="Let both sides compute one expression: give the sampler the merged weights that the trainer "
    "scores with.",
    tries="s (x A) B added to x W in each product, with the base as it was, or as merging and unmerging has "
    "left it",
    plants=(Plant(group="weights", make=unmerged_in_bf16),),
)
