"""The defaults of the checkpoint's generation_config.json, which vLLM and transformers obey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from ....files.reading import read_json
from ...engines.generation_config import generation_defaults
from ...hypotheses.evidence import Evidence
from ...hypotheses.penalties import repetition
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.sampling import Settings
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Each part of the defaults, the whole first: what a request says replaces its default."""
    given = generation_defaults(evidence.scorer.folder)
    rows = evidence.scorer.rows(evidence) if given else None
    for size in range(len(given), 0, -1):
        for names in combinations(given, size):
            part = {name: given[name] for name in names}
            listed = ", ".join(f"{name} {value:g}" for name, value in part.items())
            penalty = float(part.pop("repetition_penalty", 1.0))
            if penalty == 1.0 and all(p == p._replace(**part) for p in evidence.params()):
                continue
            transform = repetition if penalty != 1.0 else None
            scores = rows.scores(transform, lambda p, _, part=part: p._replace(**part), penalty)
            what = f"the sampler took {listed} from the checkpoint's generation_config.json"
            yield Prediction(what, scores, params=part)


def _obeyed(w: World, drawn: Settings, declared: Settings, **defaults) -> Log:
    """A sampler that obeys the defaults of a checkpoint, beside a trainer that does not."""
    name = "-".join(f"{k}{v}" for k, v in defaults.items())
    folder = w.copy(f"defaults-{name}")
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    path.write_text(json.dumps(raw | defaults))
    return w.sampler(drawn=drawn, declared=declared, options={"model": str(folder)})


def all_defaults_obeyed(w: World) -> Log:
    """A request that says nothing."""
    t, p = w.uniform(0.6, 0.75), w.uniform(0.8, 0.95)
    drawn = replace(w.raw, temperature=t, top_k=20, top_p=p)
    return _obeyed(w, drawn, w.raw, temperature=t, top_k=20, top_p=p)


def defaults_obeyed_but_for_the_temperature(w: World) -> Log:
    """A request that says its temperature."""
    p = w.uniform(0.8, 0.9)
    return _obeyed(w, replace(w.usual, top_p=p), w.usual, temperature=0.6, top_p=p, do_sample=True)


def default_penalty_obeyed(w: World) -> Log:
    """A penalty that nobody asked for."""
    x = w.uniform(1.05, 1.15)
    return _obeyed(w, replace(w.usual, repetition=x), w.usual, repetition_penalty=x)


FAULT = Predicted(
    name="generation_config.json",
    order=50,
    predict=predict,
    remedy="Give the sampler its settings explicitly (vLLM: generation_config='vllm').",
    tries="the checkpoint's own defaults, which vLLM and transformers obey: all of them, and each part, "
    "since what a request says replaces its default",
    is_at_once=True,
    plants=(
        Plant(group="settings", make=all_defaults_obeyed, named=("generation_config",)),
        Plant(group="settings", make=defaults_obeyed_but_for_the_temperature, named=("generation_config",)),
        Plant(
            group="settings", make=default_penalty_obeyed, named=("generation_config", "repetition penalty")
        ),
    ),
)
