"""Keys and values of the cache in 8 bits.

    x -> s round(clip(x / s))    in fp8 or int8

Shapes: T tokens of packed sequences, k and v [T, Hkv, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....files.dtypes import dtype_name
from ....kernels.quantise import LARGEST, clipped
from ....model.checkpoint import DTYPES
from ....model.kv_rounding import quantised_kv
from ....model.quantisation import KvQuantisation
from ...hypotheses.attention_again import Variant, attention_scores
from ...hypotheses.compared import apart
from ...hypotheses.evidence import Evidence
from ...hypotheses.noise import measured
from ...hypotheses.prediction import Prediction
from ...hypotheses.scorable_lines import Scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def calibrated(x: torch.Tensor, share: float) -> torch.Tensor:
    """x [T, H, D] as a cache in fp8 e4m3 with one scale for all gives it back, in fp32.

    share: of the largest value, which takes the largest number of e4m3; larger ones are clipped.
    """
    scale = (x.float().abs().max() * share / LARGEST["float8_e4m3fn"]).clamp(min=1e-12)
    return clipped(x.float() / scale, "float8_e4m3fn") * scale


def _by_token(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A cache whose scales depend on a token alone, as `perturb.kv` names it."""
    return partial(quantised_kv, how=KvQuantisation.parse(text))


_CACHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8 e4m3": _by_token("float8_e4m3fn/unit"),
    "fp8 e5m2": _by_token("float8_e5m2/unit"),
    "fp8 e4m3, scaled by their largest value": partial(calibrated, share=1.0),
    "int8, scaled by token and head": _by_token("int8/token_head"),
}
# Shares of the largest value at which a cache of one scale may clip, and how often halves are tried about
# the best one.
_CLIPPED, _HALVES = np.geomspace(0.2, 0.98, 5), 3


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Keys and values in 8 bits.

    Whether such a value rounds up or down depends on the bits below it. So the same cache is computed in fp32
    and in bf16, and how far these two are apart is what two engines with it may be.
    """
    scorer, name = evidence.scorer, dtype_name(evidence.scorer.dtype)
    other = "bfloat16" if name == "float32" else "float32"
    decoders = {name: scorer.model(), other: scorer.decoder(dtype=DTYPES[other])}
    plain = {dtype: attention_scores(evidence, Variant(), decoder) for dtype, decoder in decoders.items()}

    def stored(store: Callable[[torch.Tensor], torch.Tensor], t: str) -> tuple[Scores, Scores]:
        scores = attention_scores(evidence, Variant(store=store), decoders[t])
        return scores, {i: _moved(x.scored, scores[i], plain[t][i]) for i, x in enumerate(evidence.lines)}

    share, shares = _nearest_share(evidence, lambda share: stored(partial(calibrated, share=share), name)[1])
    clipped_at = f"fp8 e4m3, clipped at {share:.2g} of their largest value"
    for words, store in (_CACHES | {clipped_at: partial(calibrated, share=share)}).items():
        rounded = {t: stored(store, t) for t in decoders}
        noise = measured(other, *(list(scores.values()) for scores, _ in rounded.values()))
        for _, effect in rounded.values():
            choices = shares if words == clipped_at else 1
            yield Prediction(
                f"the sampler's keys and values are in {words}", effect, noise=noise, choices=choices
            )


def _nearest_share(evidence: Evidence, effect_of: Callable[[float], Scores]) -> tuple[float, int]:
    """The share of the largest value that comes nearest to the log when it clips, and how many were tried."""
    lines, tried = evidence.lines, {}
    for number in range(_HALVES + 1):
        known = sorted(tried)
        i = known.index(min(known, key=tried.get)) if known else 0
        pairs = pairwise(known[max(i - 1, 0) : i + 2])
        for share in [math.sqrt(a * b) for a, b in pairs] if number else _CLIPPED.tolist():
            tried[share] = sum(np.nansum(apart(lines[i], x)) for i, x in effect_of(share).items())
    return min(tried, key=tried.get), len(tried)


def _moved(scored: np.ndarray, changed: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """scored + (changed - plain), [C] fp32."""
    with np.errstate(invalid="ignore"):
        return (scored.astype(np.float64) + changed - plain).astype(np.float32)


# --- plants: transformers' own cache, changed ---


def _through(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    return ((x.float() / scale).clamp(-448.0, 448.0).to(dtype).float() * scale).to(x.dtype)


def fp8_cache(w: World) -> Log:
    """e4m3 without a scale."""
    return w.sampler(cache=w.cache(lambda x, _: x.to(torch.float8_e4m3fn).to(x.dtype)))


def fp8_e5m2_cache(w: World) -> Log:
    """e5m2 without a scale."""
    return w.sampler(cache=w.cache(lambda x, _: x.to(torch.float8_e5m2).to(x.dtype)))


def scaled_fp8_cache(w: World) -> Log:
    """A scale of each layer and forward: that of the tokens that it stores."""
    return w.sampler(cache=w.cache(lambda x, _: _through(x, torch.float8_e4m3fn, x.abs().max() / 448.0)))


def clipped_fp8_cache(w: World) -> Log:
    """A scale from a calibration with prompts, that is too small: large keys are clipped."""
    share = w.uniform(0.3, 0.5)

    def store(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return _through(x, torch.float8_e4m3fn, largest * share / 448.0)

    return w.sampler(cache=w.cache(store))


def int8_cache(w: World) -> Log:
    """Whole numbers with a scale for each token and head."""

    def store(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        scale = (x.float().abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-12)
        return ((x.float() / scale).round() * scale).to(x.dtype)

    return w.sampler(cache=w.cache(store))


FAULT = Predicted(
    name="keys and values rounded",
    order=320,
    predict=predict,
    needs_decoder=True,
    remedy="Give the cache the compute dtype, or score with rounded keys and values too (kv_cache_dtype).",
    tries="a cache in fp8 e4m3 or e5m2, in e4m3 scaled by the largest value or clipped at a share of it that "
    "is searched, in int8 with a scale for each token and head",
    is_dimmed=True,
    is_second=True,
    perturb=("kv",),
    plants=tuple(
        Plant(group="attention", make=make, named=("keys and values",))
        for make in (fp8_cache, fp8_e5m2_cache, scaled_fp8_cache, clipped_fp8_cache, int8_cache)
    ),
)
