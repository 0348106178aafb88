"""Hypotheses about attention: rounded keys and values, a window, a soft cap, a sink.

    scores = q k^T / sqrt(D),  s = cap tanh(scores / cap),  o = softmax(s over the window, and a sink) v

Attention is computed again from what the decoder gives its own, and written over its output.
Shapes: T tokens of packed sequences, q [T, Hq, D], k and v [T, Hkv, D].
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from ...model.decoder import Decoder, Hook, PackedContext
from .evidence import Evidence
from .prediction import Prediction
from .scorer import decoder_scores

# Windows that are tried, in tokens, and soft caps.
_WINDOWS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
_CAPS = (2.0, 3.0, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0, 50.0)
_CACHES = {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}


class Variant(NamedTuple):
    """What attention does otherwise."""

    window: int = 0  # keys that a token reads, itself included; 0 is all
    cap: float = 0.0
    sink: bool = False  # a further score of 0 in the softmax


def rounded_cache(evidence: Evidence) -> Iterator[Prediction]:
    """Keys and values in fp8."""
    model = evidence.scorer.model()
    for name, dtype in _CACHES.items():
        numerics = model.numerics._replace(cache=dtype)
        decoder = Decoder(model.config, model.flat.detach(), model.layout, numerics)
        yield Prediction(f"the sampler's keys and values are in {name}", decoder_scores(decoder, evidence))


def another_attention(evidence: Evidence) -> Iterator[Prediction]:
    """A sliding window, a soft cap of the scores, or a sink that only one side has."""
    longest = max(len(x.prompt_ids) + len(x.completion_ids) for x in evidence.lines)
    for window in (w for w in _WINDOWS if w < longest):
        what = f"the sampler's attention has a sliding window of {window} tokens"
        yield Prediction(what, _scores(evidence, Variant(window=window)))
    caps = {cap: _scores(evidence, Variant(cap=cap)) for cap in _CAPS}
    for cap, scores in caps.items():
        yield Prediction(f"the scores of the sampler's attention are soft-capped at {cap:g}", scores)
    what = "the sampler's attention has a sink, a further score of 0 in each softmax"
    yield Prediction(what, _scores(evidence, Variant(sink=True)))


def _scores(evidence: Evidence, variant: Variant):
    model = evidence.scorer.model()
    return decoder_scores(model, evidence, hook_of=lambda context: _over(model, context, variant))


def _over(decoder: Decoder, context: PackedContext, variant: Variant) -> Hook:
    """A hook that writes the variant's output over that of attention."""
    c = decoder.config
    starts = [*(context.positions == 0).nonzero().flatten().tolist(), len(context.positions)]
    inputs: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        op = name.rpartition(".")[2]
        if op == "attention":
            q, k = inputs["rope"].split([c.heads, c.kv_heads], dim=1)
            v = inputs["qkv"][:, c.heads + c.kv_heads :]
            for part in (slice(*ends) for ends in pairwise(starts)):
                x[part] = attend(q[part], k[part], v[part], variant).to(x.dtype).view_as(x[part])
        inputs[op] = x

    return hook


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Attention of one sequence in fp32, [T, Hq, D]."""
    T, groups = len(q), q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if variant.cap:
        scores = variant.cap * torch.tanh(scores / variant.cap)
    read = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    if variant.window:
        read = read.triu(1 - variant.window)
    scores = scores.masked_fill(~read, -torch.inf)
    if variant.sink:
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:2], 1)], -1)
    return (scores.softmax(-1)[..., :T] @ v).transpose(0, 1)
