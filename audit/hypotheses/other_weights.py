"""The trainer's model with other weights, or with another field of its configuration."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...model.decoder import Decoder
from .evidence import Evidence
from .prediction import Prediction
from .scorable_lines import Scores
from .scores import decoder_scores
from .slope import slope

SEARCHED_SHARES = 3  # that a line search computes with


def with_weights(evidence: Evidence, flat: torch.Tensor) -> Decoder:
    """The trainer's model with other weights, flat as its own."""
    model = evidence.scorer.model()
    return Decoder(model.config, flat, model.layout, model.numerics)


def with_config(evidence: Evidence, what: str, **fields: Any) -> Prediction:
    """What the log would hold if `what` were so: the model with other fields of its configuration."""
    model = evidence.scorer.model()
    decoder = Decoder(replace(model.config, **fields), model.flat.detach(), model.layout, model.numerics)
    return Prediction(what, decoder_scores(decoder, evidence))


def line_search(evidence: Evidence, older: torch.Tensor, exact: torch.Tensor) -> tuple[float, Scores]:
    """The share of a step that comes nearest to the log, from two slopes, and what the log would hold."""
    scale = 0.0
    for _ in range(2):
        flat = (older.double() + scale * (exact.double() - older.double())).to(exact.dtype)
        scores = decoder_scores(with_weights(evidence, flat), evidence)
        effects, differences = [], []
        for i, line in enumerate(evidence.lines):
            effects.append(scores[i].astype(np.float64) - line.scored)
            differences.append(line.logged.astype(np.float64) - line.scored)
        angle, _ = slope(effects, differences, [x.scored for x in evidence.lines])
        scale = 1.0 - angle * (1.0 - scale)
    flat = (older.double() + scale * (exact.double() - older.double())).to(exact.dtype)
    return scale, decoder_scores(with_weights(evidence, flat), evidence)
