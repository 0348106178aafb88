"""Another dtype of the merge; A and B in 16 bits; a base that earlier merges have changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....model.checkpoint import DTYPES, stored_dtype
from ...hypotheses.adapters import NARROW, base_weights, left_by, merge_into, predicted, read, rounded
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted
from ..planting.adapters import log_of, with_products, written

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Each dtype, and what merging and unmerging the other adapters has left."""
    named = evidence.scorer.adapters
    if not named:
        return
    adapter, stored = read(evidence, named.merged), stored_dtype(evidence.scorer.folder)
    for name, dtype in DTYPES.items():
        if dtype != stored:
            flat = base_weights(evidence)
            merge_into(evidence, flat, adapter, adapter.lora.scale, dtype)
            yield predicted(evidence, f"the sampler's adapter is merged in {name}", flat)
    history = [read(evidence, folder) for folder in named.others]
    for name in NARROW:
        dtype, flat = DTYPES[name], base_weights(evidence)
        merge_into(evidence, flat, rounded(adapter, dtype), adapter.lora.scale, dtype)
        yield predicted(evidence, f"the sampler's A and B are in {name}, and merged in it", flat)
        if history:
            flat = left_by(evidence, history, dtype)
            merge_into(evidence, flat, adapter, adapter.lora.scale, dtype)
            what = f"the sampler's base is what merging and unmerging the other adapters in {name} left"
            yield predicted(evidence, what, flat)


def merged_in_bf16(w: World) -> Log:
    """An engine in fp32 that merges in bf16, beside a trainer that merges in fp32."""
    adapter = written(w)
    sampler = with_products(w, adapter.products, merged=lambda x: x.bfloat16().float(), dtype=w.exact)
    return log_of(w, sampler, adapter)


FAULT = Predicted(
    name="adapter merged otherwise",
    order=270,
    predict=predict,
    needs_decoder=True,
    remedy="Merge into the untouched base each time, in fp32, and round once; never unmerge in 16 bits.",
    tries="fp32, bf16 or fp16, A and B in 16 bits, and a base that merging and unmerging the other adapters "
    "in 16 bits has left",
    plants=(Plant(group="weights", make=merged_in_bf16),),
)
