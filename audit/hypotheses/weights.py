"""Hypotheses about the weights: another checkpoint, a stale cache, weights or sums in another dtype."""

from collections.abc import Iterator

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...kernels.quantise import quantise
from ...model.cache import BlockCache, CachedContext
from ...model.checkpoint import DTYPES
from ...model.decoder import Decoder
from ...model.quantisation import is_quantised
from .evidence import Evidence
from .lines import Scores
from .prediction import Prediction
from .scorer import decoder_scores, read_rows
from .slope import slope


def another_checkpoint(evidence: Evidence) -> Iterator[Prediction]:
    """The other checkpoints that were named, one by one."""
    scorer = evidence.scorer
    for folder in scorer.checkpoints:
        decoder = scorer.decoder(folder)
        scores = decoder_scores(decoder, evidence)
        yield Prediction(f"the sampler computed with the weights of {folder}", scores, decoder=decoder)


# Kinds of tensors that a sync may leave out, by a part of their names.
_KINDS = {
    "the embedding and lm_head": ("embed_tokens", "lm_head"),
    "the norms": ("norm",),
    "the attention's projections": ("self_attn",),
    "the MLP's projections": (".mlp.",),
    "the biases": (".bias",),
}


def incomplete_sync(evidence: Evidence) -> Iterator[Prediction]:
    """One kind of tensors of another checkpoint, all others of the model."""
    scorer = evidence.scorer
    model = scorer.model()
    for folder in scorer.checkpoints:
        older = model.layout.checkpoint_views(scorer.decoder(folder).flat.detach())
        for kind, parts in _KINDS.items():
            flat = model.flat.detach().clone()
            views = model.layout.checkpoint_views(flat)
            left_out = [name for name in views if any(part in name for part in parts)]
            if all(torch.equal(views[name], older[name]) for name in left_out):
                continue
            for name in left_out:
                views[name].copy_(older[name])
            what = f"{kind} in the sampler are of {folder}, all other tensors are the model's"
            yield Prediction(what, decoder_scores(with_weights(evidence, flat), evidence))


def repeated_update(evidence: Evidence) -> Iterator[Prediction]:
    """The step from another checkpoint to the model's, taken twice and three times.

    A merge of an adapter into weights that it was merged into before leaves such weights.
    """
    scorer = evidence.scorer
    exact = scorer.model().flat.detach()
    for folder in scorer.checkpoints:
        step = exact.double() - scorer.decoder(folder).flat.detach().double()
        if not step.any():
            continue
        for times in (2, 3):
            flat = (exact + (times - 1) * step).to(exact.dtype)
            what = f"the update from {folder} to the model is in the sampler's weights {times} times"
            yield Prediction(what, decoder_scores(with_weights(evidence, flat), evidence))


def stale_prefix(evidence: Evidence) -> Iterator[Prediction]:
    """Keys and values of the prompt by other weights, those of the completion by the model's model."""
    scorer = evidence.scorer
    for folder in scorer.checkpoints:
        older = scorer.decoder(folder)
        rows = [
            _after_prefix(older, scorer.model(), line.prompt_ids, line.pair[1]) for line in evidence.lines
        ]
        scores = read_rows(scorer.model(), rows, evidence.pairs(), evidence.params())
        what = f"the sampler's cache of the prompts was computed with the weights of {folder}"
        yield Prediction(what, evidence.by_line(scores))


@torch.no_grad()
def _after_prefix(older: Decoder, model: Decoder, prompt: tuple[int, ...], completion: tuple[int, ...]):
    """The rows [C, D] of a completion whose prompt, but for its last token, is in the cache of `older`."""
    inputs, first = [*prompt, *completion[:-1]], len(prompt) - 1
    cache = BlockCache(model.config, -(-len(inputs) // KEY_TILE), model.cache_dtype, model.device)
    blocks = [cache.allocate(cache.blocks)]
    if first:
        context = CachedContext(cache, [first], [0], blocks)
        older.hidden(torch.tensor(inputs[:first]), context)
    rest = inputs[first:]
    return model.hidden(torch.tensor(rest), CachedContext(cache, [len(rest)], [first], blocks))


def rounded_weights(evidence: Evidence) -> Iterator[Prediction]:
    """The weights in a narrower dtype than the trainer's.

    A merge of an adapter in bf16 leaves such weights, and so does a sync in a narrower dtype.
    """
    scorer = evidence.scorer
    exact = scorer.model().flat.detach()
    for name in ("bfloat16", "float16"):
        rounded = exact.to(DTYPES[name]).to(exact.dtype)
        if not torch.equal(rounded, exact):
            yield Prediction(
                f"the sampler's weights are rounded to {name}, the trainer's are not",
                decoder_scores(with_weights(evidence, rounded), evidence),
            )


# Sizes of the blocks with one scale each.
_BLOCKS = (128, 64, 32)


def quantised_weights(evidence: Evidence) -> Iterator[Prediction]:
    """The matrices of all layers in fp8 e4m3 or int8, with a scale for each matrix, row or block.

    They are rounded from the model's weights, or from these in bf16.
    """
    model = evidence.scorer.model()
    for words, format in {"fp8 e4m3": "float8_e4m3fn", "int8": "int8"}.items():
        for part, size in {"matrix": 0, "row": 1, **{f"block of {n} x {n}": n for n in _BLOCKS}}.items():
            for source in (torch.float32, torch.bfloat16):
                if format == "int8" and size > 1:
                    continue
                flat = model.flat.detach().clone()
                for name, w in model.layout.checkpoint_views(flat).items():
                    if is_quantised(name):
                        w.copy_(quantise(w.to(source), format, size))
                of = "" if source == torch.float32 else ", from bf16"
                what = f"the sampler's weights are quantised to {words}, one scale for each {part}{of}"
                decoder = with_weights(evidence, flat)
                yield Prediction(what, decoder_scores(decoder, evidence), decoder=decoder)


def between_checkpoints(evidence: Evidence) -> Iterator[Prediction]:
    """Weights between another checkpoint and the model's, or beyond it: older + s (model - older).

    The difference follows that of the whole step with the slope 1 - s, so that s need not be searched.
    """
    scorer = evidence.scorer
    exact = scorer.model().flat.detach()
    for folder in scorer.checkpoints:
        older = scorer.decoder(folder).flat.detach()
        if not torch.equal(older, exact):
            scale, scores = line_search(evidence, older, exact)
            yield Prediction(
                f"the sampler's weights hold {scale:.2g} of the step from {folder} to the model",
                scores,
                SEARCHED_SHARES,
            )


SEARCHED_SHARES = 3  # that a line search computes with


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


def with_weights(evidence: Evidence, flat: torch.Tensor) -> Decoder:
    """The trainer's model with other weights, flat as its own."""
    model = evidence.scorer.model()
    return Decoder(model.config, flat, model.layout, model.numerics)


def another_dtype(evidence: Evidence) -> Iterator[Prediction]:
    """The whole forward, or the logits alone, in another dtype."""
    scorer = evidence.scorer
    for name, scores in evidence.by_dtype.items():
        if DTYPES[name] != scorer.dtype:
            yield Prediction(f"the sampler computed in {name}", scores)
    if scorer.head != torch.float32:
        model = scorer.model()
        numerics = model.numerics._replace(lm_head=torch.float32)
        decoder = Decoder(model.config, model.flat.detach(), model.layout, numerics)
        what = "the sampler's logits are in float32"
        yield Prediction(what, decoder_scores(decoder, evidence))
