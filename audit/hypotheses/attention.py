"""Hypotheses about attention: rounded keys and values, a window, a soft cap, a sink.

    k', v' = stored(k), stored(v),    stored(x) = s round(clip(x / s)) in fp8 or int8
    scores = q k'^T / sqrt(D),  s = cap tanh(scores / cap),  o = softmax(s over the window, and a sink) v'

Attention is computed again from what the decoder gives its own, and written over its output.
Shapes: T tokens of packed sequences, q [T, Hq, D], k and v [T, Hkv, D].
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ...model.checkpoint import DTYPES
from ...model.context import Hook, PackedContext
from ...model.decoder import Decoder
from .evidence import Evidence
from .lines import Scores
from .noise import measured
from .prediction import Prediction
from .scorer import decoder_scores

# Windows that are tried, in tokens, and soft caps.
_WINDOWS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
_CAPS = (2.0, 3.0, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0, 50.0)


def stored(x: torch.Tensor, dtype: torch.dtype, share: float = 0.0) -> torch.Tensor:
    """x [T, H, D] as a cache of `dtype` gives it back, in fp32.

    share: of the largest value, which takes the largest number of the dtype; larger ones are clipped. 0 is no
    scale. int8 has a scale for each token and head, fp8 one for all.
    """
    x = x.float()
    if dtype == torch.int8:
        scale = (x.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-12)
        return (x / scale).round() * scale
    most = torch.finfo(dtype).max
    scale = (x.abs().max() * share / most).clamp(min=1e-12) if share else torch.ones(())
    return (x / scale).clamp(-most, most).to(dtype).float() * scale


_E4M3 = torch.float8_e4m3fn
_CACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8 e4m3": partial(stored, dtype=_E4M3),
    "fp8 e5m2": partial(stored, dtype=torch.float8_e5m2),
    "fp8 e4m3, scaled by their largest value": partial(stored, dtype=_E4M3, share=1.0),
    "fp8 e4m3, clipped at half of their largest value": partial(stored, dtype=_E4M3, share=0.5),
    "fp8 e4m3, clipped at a quarter of their largest value": partial(stored, dtype=_E4M3, share=0.25),
    "int8, scaled by token and head": partial(stored, dtype=torch.int8),
}


class Variant(NamedTuple):
    """What attention does otherwise."""

    window: int = 0  # keys that a token reads, itself included; 0 is all
    cap: float = 0.0
    sink: bool = False  # a further score of 0 in the softmax
    store: Callable[[torch.Tensor], torch.Tensor] | None = None  # what keys and values go through


def rounded_cache(evidence: Evidence) -> Iterator[Prediction]:
    """Keys and values in 8 bits.

    Whether such a value rounds up or down depends on the bits below it. So the same cache is computed in fp32
    and in bf16, and how far these two are apart is what two engines with it may be.
    """
    scorer, name = evidence.scorer, str(evidence.scorer.dtype).removeprefix("torch.")
    other = "bfloat16" if name == "float32" else "float32"
    decoders = {name: scorer.model(), other: scorer.decoder(dtype=DTYPES[other])}
    plain = {dtype: _scores(evidence, Variant(), decoder) for dtype, decoder in decoders.items()}
    for words, store in _CACHES.items():
        rounded = {t: _scores(evidence, Variant(store=store), decoder) for t, decoder in decoders.items()}
        noise = measured(other, *(list(x.values()) for x in rounded.values()))
        for t, scores in rounded.items():
            effect = {i: _moved(x.scored, scores[i], plain[t][i]) for i, x in enumerate(evidence.lines)}
            yield Prediction(f"the sampler's keys and values are in {words}", effect, noise=noise)


def _moved(scored: np.ndarray, changed: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """scored + (changed - plain), [C] fp32."""
    with np.errstate(invalid="ignore"):
        return (scored.astype(np.float64) + changed - plain).astype(np.float32)


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


def _scores(evidence: Evidence, variant: Variant, decoder: Decoder | None = None) -> Scores:
    """What the lines would hold. decoder: by default the trainer's model."""
    decoder = decoder or evidence.scorer.model()
    return decoder_scores(decoder, evidence, hook_of=lambda context: _over(decoder, context, variant))


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
            if variant.store is not None:
                k, v = variant.store(k), variant.store(v)
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
