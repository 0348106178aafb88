"""Attention computed again, with what a fault makes of it, from what the decoder gives its own.

    scores = scale q k'^T,  s = cap tanh(scores / cap),  o = softmax(s over the window, and a sink) v'

k' and v' are what a cache gives back. The output is written over the decoder's own.
Shapes: T tokens of packed sequences, q [T, Hq, D], k and v [T, Hkv, D].
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from ...model.context import Hook, PackedContext
from ...model.decoder import Decoder
from ...model.operations import operation
from .evidence import Evidence
from .scorable_lines import Scores
from .scores import decoder_scores


class Variant(NamedTuple):
    """What attention does otherwise."""

    window: int = 0  # keys that a token reads, itself included; 0 is all
    cap: float = 0.0
    sink: bool = False  # a further score of 0 in the softmax
    store: Callable[[torch.Tensor], torch.Tensor] | None = None  # what keys and values go through


def attention_scores(evidence: Evidence, variant: Variant, decoder: Decoder | None = None) -> Scores:
    """What the lines would hold. decoder: by default the trainer's model."""
    decoder = decoder or evidence.scorer.model()
    return decoder_scores(decoder, evidence, hook_of=lambda context: _over(decoder, context, variant))


def _over(decoder: Decoder, context: PackedContext, varied: Variant) -> Hook:
    """A hook that writes the variant's output over that of attention, with what the layer has itself."""
    c = decoder.config
    starts = [*(context.positions == 0).nonzero().flatten().tolist(), len(context.positions)]
    inputs: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        op = name.rpartition(".")[2]
        if op == "attention":
            row = operation(name, c)
            variant = varied._replace(
                window=min(filter(None, (varied.window, row.window)), default=0),
                cap=varied.cap or row.cap,
            )
            q, k = inputs["rope"].split([c.heads, c.kv_heads], dim=1)
            v = inputs["qkv"][:, c.heads + c.kv_heads :]
            if variant.store is not None:
                k, v = variant.store(k), variant.store(v)
            for part in (slice(*ends) for ends in pairwise(starts)):
                x[part] = attend(q[part], k[part], v[part], variant, row.factor).to(x.dtype).view_as(x[part])
        inputs[op] = x

    return hook


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, scale: float) -> torch.Tensor:
    """Attention of one sequence in fp32, [T, Hq, D]. scale: of the scores."""
    T, groups = len(q), q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * scale
    if variant.cap:
        scores = variant.cap * torch.tanh(scores / variant.cap)
    read = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    if variant.window:
        read = read.triu(1 - variant.window)
    scores = scores.masked_fill(~read, -torch.inf)
    if variant.sink:
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:2], 1)], -1)
    return (scores.softmax(-1)[..., :T] @ v).transpose(0, 1)
