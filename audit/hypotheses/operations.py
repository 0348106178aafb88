"""Hypotheses about single operations: another rotary embedding or epsilon, and intermediates in 16 bits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from ...kernels.rope import rope_table
from ...model.config import ModelConfig
from ...model.context import Hook, PackedContext
from ...model.decoder import Decoder
from .evidence import Evidence
from .prediction import Prediction
from .scorer import decoder_scores

# Bases of the rotary embedding of the supported families, and epsilons of their norms.
_THETAS = (1e4, 1e5, 5e5, 1e6)
_EPSILONS = (1e-5, 1e-6, 1e-8)
# Of the search for a base: lines, its ends, and how often the step is halved.
_FEW, _LOW, _HIGH, _ROUNDS = 6, 1e3, 1e7, 8


def another_rotation(evidence: Evidence) -> Iterator[Prediction]:
    """Another base of the rotary embedding, usual ones and a searched one, or no scaling of it."""
    config = evidence.scorer.model().config
    for theta in dict.fromkeys((*_THETAS, config.rope_theta / 2, config.rope_theta * 2)):
        if theta != config.rope_theta:
            what = f"the sampler's rope_theta is {theta:g}, the checkpoint's {config.rope_theta:g}"
            yield _with_config(evidence, what, replace(config, rope_theta=theta))
    if config.rope_llama3 is not None:
        what = "the sampler leaves out the checkpoint's rope_scaling"
        yield _with_config(evidence, what, replace(config, rope_llama3=None))
        for theta in _THETAS:
            if theta != config.rope_theta:
                words = f"{what}, and its rope_theta is {theta:g}"
                yield _with_config(evidence, words, replace(config, rope_llama3=None, rope_theta=theta))
    theta, tried = _nearest_theta(evidence, config)
    if theta != config.rope_theta:
        what = f"the sampler's rope_theta is about {theta:.2g}, the checkpoint's {config.rope_theta:g}"
        yield replace(_with_config(evidence, what, replace(config, rope_theta=theta)), choices=tried)


def _nearest_theta(evidence: Evidence, config: ModelConfig) -> tuple[float, int]:
    """The base that comes nearest to the log, searched on a few lines, and of how many."""
    few = replace(evidence, lines=evidence.lines[:: max(1, len(evidence.lines) // _FEW)][:_FEW])
    tried: dict[float, float] = {}

    def loss(theta: float) -> float:
        if theta not in tried:
            scores = _with_config(few, "", replace(config, rope_theta=theta)).scores
            gaps = [np.abs(x.logged - scores[i]) for i, x in enumerate(few.lines)]
            tried[theta] = sum(float(np.nansum(np.minimum(gap, 1.0))) for gap in gaps)
        return tried[theta]

    points = [config.rope_theta, *np.geomspace(_LOW, _HIGH, 9).tolist()]
    for _ in range(_ROUNDS):
        min(points, key=loss)
        known = sorted(tried)
        at = known.index(min(known, key=loss))
        ends = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        points = [math.sqrt(known[at] * end) for end in ends if end != known[at]]
    return min(points + list(tried), key=loss), len(tried)


def another_epsilon(evidence: Evidence) -> Iterator[Prediction]:
    """Another epsilon in all norms."""
    config = evidence.scorer.model().config
    for eps in _EPSILONS:
        if eps != config.eps:
            what = f"the epsilon of the sampler's norms is {eps:g}, the checkpoint's {config.eps:g}"
            yield _with_config(evidence, what, replace(config, eps=eps))


def _with_config(evidence: Evidence, what: str, config: ModelConfig) -> Prediction:
    model = evidence.scorer.model()
    decoder = Decoder(config, model.flat.detach(), model.layout, model.numerics)
    return Prediction(what, decoder_scores(decoder, evidence))


def narrow_intermediates(evidence: Evidence) -> Iterator[Prediction]:
    """A fused rotary embedding or activation that keeps its intermediates in 16 bits."""
    model = evidence.scorer.model()
    parts = {"rotary embedding": ("rope",), "activation": ("silu_mul",)}
    parts["rotary embedding and activation"] = ("rope", "silu_mul")
    for dtype in (torch.bfloat16, torch.float16):
        for words, ops in parts.items():
            scores = decoder_scores(model, evidence, hook_of=_narrowing(model, ops, dtype))
            name = str(dtype).removeprefix("torch.")
            yield Prediction(f"intermediates of the sampler's {words} are in {name}", scores)


def _narrowing(decoder: Decoder, ops: tuple[str, ...], dtype: torch.dtype) -> Callable[[PackedContext], Hook]:
    """A hook that computes `ops` again in `dtype`, and writes the result over the decoder's own output."""

    def hook_of(context: PackedContext) -> Hook:
        cos, sin = _rows_of_table(decoder, context.positions, dtype)
        inputs: dict[str, torch.Tensor] = {}

        def hook(name: str, x: torch.Tensor) -> None:
            op = name.rpartition(".")[2]
            if op == "rope" and op in ops:
                before = inputs.get("qk_norm", inputs["qkv"])[:, : x.shape[1]]
                x.copy_(_rotated(before.to(dtype), cos, sin))
            elif op == "silu_mul" and op in ops:
                g, u = inputs["gate_up"].to(dtype).chunk(2, dim=-1)
                x.copy_(torch.nn.functional.silu(g) * u)
            inputs[op] = x

        return hook

    return hook_of


def _rows_of_table(
    decoder: Decoder, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the positions, [T, 1, D / 2]."""
    c = decoder.config
    tables = rope_table(c.frequencies, c.max_positions, dtype)
    return tuple(t[positions.cpu()].to(decoder.device).unsqueeze(1) for t in tables)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] rotated, every product and sum rounded to the dtype of x."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
