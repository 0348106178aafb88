"""The adapter with another scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....model.checkpoint import stored_dtype
from ....model.lora import Lora
from ...hypotheses.adapters import base_weights, merge_into, predicted, read
from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import SEARCHED_SHARES, line_search
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted
from ..planting.adapters import log_of, with_products, written

if TYPE_CHECKING:
    from ..planting.world import Log, World


def _scales(lora: Lora) -> dict[str, float]:
    """Scales that an engine may take in place of alpha / rank, in words. Those that equal it are left out."""
    r, alpha = lora.rank, lora.alpha
    scales = {
        "alpha and the rank are left out: s = 1": 1.0,
        "alpha is left out: s = 1 / rank": 1.0 / r,
        "the division by the rank is left out: s = alpha": alpha,
        "it is rank-stabilised: s = alpha / sqrt(rank)": alpha / math.sqrt(r),
        "a rank-stabilised scale is lost: s = alpha / (rank sqrt(rank))": lora.scale / math.sqrt(r),
        "it is merged twice: s = 2 alpha / rank": 2.0 * lora.scale,
    }
    return {what: s for what, s in scales.items() if s != lora.scale}


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The adapter with the scales of usual mistakes, and with the one that comes nearest to the log."""
    if not evidence.scorer.adapters:
        return
    adapter, dtype = read(evidence, evidence.scorer.adapters.merged), stored_dtype(evidence.scorer.folder)
    for what, scale in _scales(adapter.lora).items():
        flat = base_weights(evidence)
        merge_into(evidence, flat, adapter, scale, dtype)
        yield predicted(evidence, f"the sampler scales the adapter otherwise: {what}", flat)
    model = evidence.scorer.model()
    base = evidence.scorer.base_weights().to(model.device, model.dtype)
    share, scores = line_search(evidence, base, model.flat.detach())
    what = f"the sampler scales the adapter by {share:.2g} of its own scale"
    yield Prediction(what, scores, SEARCHED_SHARES)


def adapter_of_another_scale(w: World) -> Log:
    """A part of the adapter."""
    adapter = written(w)
    return log_of(w, with_products(w, adapter.products, w.uniform(0.3, 0.7)), adapter)


FAULT = Predicted(
    name="adapter scaled otherwise",
    order=260,
    predict=predict,
    needs_decoder=True,
    remedy="Give both sides one scale: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.",
    tries="s = 1, 1 / rank, alpha, alpha / sqrt(rank), alpha / (rank sqrt(rank)), and twice its own",
    plants=(Plant(group="weights", make=adapter_of_another_scale, named=("adapter scaled",)),),
)
