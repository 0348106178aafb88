"""A bias of one token that only one side adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ....kernels.truncation import scaled_logits
from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import CAP, Rows, Transform, searched
from ...hypotheses.prediction import Prediction
from ...hypotheses.scorable_lines import Line
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_BIAS = np.array([-8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0])
_BIASED = 3  # tokens for which a bias is searched


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """A bias that the log declares and one side leaves out, or one that the log does not say."""
    rows = evidence.scorer.rows(evidence)
    if any(p.logit_bias for p in evidence.params()):
        scores = rows.scores(None, lambda p, _: p._replace(logit_bias=()), 0.0)
        yield Prediction("the sampler leaves out the logit bias that the log declares", scores)
    for token in _suspects(rows):
        x, scores, tried = searched(rows, _BIAS, _biased(token))
        shown = evidence.scorer.tokenizer.pieces([token])[0]
        what = f"the sampler adds {x:.3g} to the logit of token {token} ({shown!r})"
        yield Prediction(what, scores, tried)


def _biased(token: int) -> Transform:
    def bias(z: torch.Tensor, line: Line, x: float) -> torch.Tensor:
        z = z.clone()
        z[:, token] += x
        return z

    return bias


def _suspects(rows: Rows) -> list[int]:
    """The tokens whose probability goes with the difference, and whose draws differ most."""
    together = drawn = squares = 0.0
    for i, z in rows.logits.items():
        line = rows.evidence.lines[i]
        p = torch.log_softmax(scaled_logits(z, line.params or SamplingParams()), -1).exp()
        d = np.nan_to_num(line.logged.astype(np.float64) - line.scored, neginf=0.0, posinf=0.0)
        d = torch.from_numpy(np.clip(d, -CAP, CAP)).float()
        ids = torch.nn.functional.one_hot(torch.tensor(line.completion_ids), z.shape[1])
        together = together + (ids - p).t() @ d
        squares = squares + (ids - p).square().sum(0)
    gain = (together.square() / (squares + 1.0)).numpy() + drawn
    return np.argsort(gain)[::-1][:_BIASED].tolist()


def logit_bias(w: World) -> Log:
    """A bias of the requests that the log does not say."""
    bias = ((int(w.rng.integers(60, 120)), w.uniform(2.0, 4.0)),)
    return w.sampler(drawn=replace(w.usual, bias=bias))


FAULT = Predicted(
    name="logit bias",
    order=90,
    predict=predict,
    remedy="Add it on both sides, and write logit_bias into the log; or take it away.",
    tries="a bias of one token; the value is searched",
    is_second=True,
    plants=(Plant(group="settings", make=logit_bias),),
)
