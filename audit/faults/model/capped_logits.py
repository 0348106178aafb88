"""Logits that one side soft-caps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import searched
from ...hypotheses.prediction import Prediction
from ...hypotheses.scorable_lines import Line
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_CAPS = np.geomspace(3.0, 100.0, 16)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The cap is searched."""
    x, scores, tried = searched(evidence.scorer.rows(evidence), _CAPS, _softcap)
    yield Prediction(f"the sampler's logits are soft-capped at {x:.3g}", scores, tried)


def _softcap(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
    return x * torch.tanh(z / x)


def logits_softcap(w: World) -> Log:
    """A sampler that obeys final_logit_softcapping, beside a trainer that does not."""
    return w.sampler(drawn=replace(w.usual, softcap=w.uniform(8.0, 14.0)))


FAULT = Predicted(
    name="soft-capped logits",
    order=120,
    predict=predict,
    remedy="Cap the logits on both sides, or on none (final_logit_softcapping).",
    tries="a search for the cap",
    plants=(Plant(group="settings", make=logits_softcap, named=("softcap", "soft-capped")),),
)
