"""A sliding window, a soft cap of the scores, or a sink that only one side has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...hypotheses.attention_again import Variant, attention_scores
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Windows that are tried, in tokens, and soft caps.
_WINDOWS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
_CAPS = (2.0, 3.0, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0, 50.0)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Windows shorter than the longest line, soft caps, and a sink."""
    longest = max(len(x.prompt_ids) + len(x.completion_ids) for x in evidence.lines)
    for window in (w for w in _WINDOWS if w < longest):
        what = f"the sampler's attention has a sliding window of {window} tokens"
        yield Prediction(what, attention_scores(evidence, Variant(window=window)))
    caps = {cap: attention_scores(evidence, Variant(cap=cap)) for cap in _CAPS}
    for cap, scores in caps.items():
        yield Prediction(f"the scores of the sampler's attention are soft-capped at {cap:g}", scores)
    what = "the sampler's attention has a sink, a further score of 0 in each softmax"
    yield Prediction(what, attention_scores(evidence, Variant(sink=True)))


# --- plants: an attention of transformers' registry ---


def _attention(cap: float = 0.0, sink: bool = False):
    def attend(module, q, k, v, mask, scaling=None, **_):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q.float() @ k.float().transpose(2, 3)) * scaling
        if cap:
            scores = cap * torch.tanh(scores / cap)
        T, S = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(T, S).tril(S - T) == 0, -torch.inf)
        if sink:
            scores = torch.cat([scores, torch.zeros(*scores.shape[:-1], 1)], -1)
        p = scores.softmax(-1)[..., :S]
        return (p.to(v.dtype) @ v).transpose(1, 2).contiguous(), None

    return attend


def sliding_window(w: World) -> Log:
    """An engine that drops the keys outside of a window."""
    return w.sampler(cache=w.cache(window=int(w.rng.choice([24, 32, 40]))))


def attention_softcap(w: World) -> Log:
    """An engine that obeys attn_logit_softcapping."""
    return w.sampler(w.with_attention("capped", _attention(cap=w.uniform(2.0, 4.0))))


def attention_sink(w: World) -> Log:
    """An engine whose kernel adds a sink of score 0."""
    return w.sampler(w.with_attention("sunk", _attention(sink=True)))


FAULT = Predicted(
    name="attention otherwise",
    order=330,
    predict=predict,
    needs_decoder=True,
    remedy="Give both sides one attention: its window (sliding_window), its soft cap, its sinks.",
    tries="a sliding window, a soft cap of the scores, a sink of score 0",
    is_late=True,
    plants=(
        Plant(group="attention", make=sliding_window, named=("window",)),
        Plant(group="attention", make=attention_softcap, named=("softcap", "soft-capped")),
        Plant(group="attention", make=attention_sink, named=("sink",)),
    ),
)
