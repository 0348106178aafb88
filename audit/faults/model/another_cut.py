"""Another top-p, top-k or min-p than the log says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...hypotheses.evidence import Evidence
from ...hypotheses.logits import one_of, searched
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


_TOP_P = 1.0 - np.geomspace(0.003, 0.6, 16)
_MIN_P = np.geomspace(0.002, 0.5, 16)
_TOP_K = np.array([1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 64, 100, 200, 500])


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Each of the three is searched."""
    rows = evidence.scorer.rows(evidence)
    p, scores, tried = searched(rows, _TOP_P, None, lambda s, p: s._replace(top_p=min(p, 1.0)))
    yield Prediction(f"the sampler drew with top-p {p:.3g}", scores, tried, params={"top_p": p})
    m, scores, tried = searched(rows, _MIN_P, None, lambda s, m: s._replace(min_p=m))
    yield Prediction(f"the sampler drew with min-p {m:.3g}", scores, tried, params={"min_p": m})
    k, scores, tried = one_of(rows, _TOP_K, None, lambda s, k: s._replace(top_k=int(k)))
    yield Prediction(f"the sampler drew with top-k {k}", scores, tried, params={"top_k": int(k)})


def min_p(w: World) -> Log:
    """A min-p that the log does not say."""
    return w.sampler(drawn=replace(w.usual, min_p=w.uniform(0.03, 0.12)))


def an_odd_top_p(w: World) -> Log:
    """A top-p that the log does not say."""
    return w.sampler(drawn=replace(w.usual, top_p=w.uniform(0.82, 0.97)))


FAULT = Predicted(
    name="another top-p, top-k or min-p",
    order=80,
    predict=predict,
    remedy="Give the sampler and the trainer the same temperature, top-p and top-k.",
    tries="a search for each value",
    is_second=True,
    perturb=("top_k", "top_p", "min_p"),
    plants=(
        Plant(group="settings", make=min_p, named=("drew with min-p",)),
        Plant(group="settings", make=an_odd_top_p, named=("drew with top-p", "without top-p")),
    ),
)
