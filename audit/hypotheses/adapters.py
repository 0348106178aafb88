"""Hypotheses about the model's LoRA adapter: missing, of another step, of another scale, merged otherwise.

    y = x W'^T,  W' = round(W + s B A)          the model, with the adapter merged in once
    y = x W^T + s (x A^T) B^T                   the adapter beside the weights

The candidates are computed exactly, by our decoder, from the base W and the adapter. They are rounded as the
model's own weights are stored, where a hypothesis does not say otherwise.

Shapes: W [N, K]; A [r, K]; B [N, r]; x [T, K]; y [T, N].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.merge import merge
from ...model.adapters import AdapterLayout, adapted_layout
from ...model.checkpoint import DTYPES, stored_dtype
from ...model.context import Hook
from ...model.lora import Lora
from ...model.peft import read_adapter, stored_lora
from .evidence import Evidence
from .prediction import Prediction
from .scorer import decoder_scores
from .weights import SEARCHED_SHARES, line_search, with_weights

# By the name of a weight in its layer: the operation that it computes, and the one that this reads.
_PLACES = {
    "qkv": ("qkv", "input_norm"),
    "o": ("o_proj", "attention"),
    "gate_up": ("gate_up", "post_norm"),
    "down": ("down_proj", "silu_mul"),
}

_NARROW = ("bfloat16", "float16")


class _Matrix(NamedTuple):
    """One matrix of the checkpoint that has an adapter."""

    name: str  # in the checkpoint
    weight: str  # of the decoder, of which the matrix is the part `rows`
    rows: slice
    b: torch.Tensor
    a: torch.Tensor


class _Adapter(NamedTuple):
    lora: Lora
    matrices: list[_Matrix]


def _read(evidence: Evidence, folder: Path) -> _Adapter:
    """The adapter of a PEFT folder, for the evidence's model. Raises ValueError (see read_adapter)."""
    lora = stored_lora(folder)
    layout = AdapterLayout(adapted_layout(evidence.scorer.model().config, lora), lora)
    views = layout.views(read_adapter(folder, layout))
    matrices = [
        _Matrix(f"{x.module}.weight", x.weight.name, x.rows, views[x.b.name], views[x.a.name])
        for x in layout.adapters
    ]
    return _Adapter(lora, matrices)


def _base(evidence: Evidence) -> torch.Tensor:
    """The base's weights, flat as the model's, in fp32 on the host. It is a tensor of its own."""
    return evidence.scorer.base_weights()


def _merge(
    evidence: Evidence, flat: torch.Tensor, adapter: _Adapter, scale: float, dtype: torch.dtype
) -> None:
    """Merge the adapter, times `scale`, into `flat` [numel] fp32; each merged matrix is of `dtype`."""
    views = evidence.scorer.model().layout.checkpoint_views(flat)
    for matrix in adapter.matrices:
        w = views[matrix.name]
        merged = torch.empty_like(w, dtype=dtype)
        merge(merged, w, matrix.b, matrix.a, scale)
        w.copy_(merged)


def _predicted(
    evidence: Evidence, what: str, flat: torch.Tensor, beside: _Adapter | None = None
) -> Prediction:
    """The log of these weights, [numel] fp32, in the audit's dtype. beside: an adapter that is not merged."""
    model = evidence.scorer.model()
    decoder = with_weights(evidence, flat.to(model.device, model.dtype))
    hook_of = (lambda _: _added(beside)) if beside else None
    return Prediction(what, decoder_scores(decoder, evidence, hook_of=hook_of))


def missing(evidence: Evidence) -> Iterator[Prediction]:
    """The base alone."""
    if evidence.scorer.adapters:
        base = evidence.scorer.adapters.base
        yield _predicted(evidence, f"the sampler computed with {base}, without the adapter", _base(evidence))


def another_adapter(evidence: Evidence) -> Iterator[Prediction]:
    """The other adapters that were named, one by one."""
    named = evidence.scorer.adapters
    for folder in named.others if named else ():
        flat, adapter = _base(evidence), _read(evidence, folder)
        _merge(evidence, flat, adapter, adapter.lora.scale, stored_dtype(evidence.scorer.folder))
        yield _predicted(evidence, f"the sampler computed with the adapter {folder}", flat)


def _scales(lora: Lora) -> dict[str, float]:
    """Scales that an engine may take in place of alpha / rank, in words. Those that equal it are left out."""
    r, alpha = lora.rank, lora.alpha
    scales = {
        "alpha and the rank are left out: s = 1": 1.0,
        "alpha is left out: s = 1 / rank": 1.0 / r,
        "the division by the rank is left out: s = alpha": alpha,
        "it is rank-stabilised: s = alpha / sqrt(rank)": alpha / math.sqrt(r),
        "a rank-stabilised scale is lost: s = alpha / (rank sqrt(rank))": lora.scale / math.sqrt(r),
        "it is merged twice: s = 2 alpha / rank": 2.0 * lora.scale,
    }
    return {what: s for what, s in scales.items() if s != lora.scale}


def another_scale(evidence: Evidence) -> Iterator[Prediction]:
    """The adapter with the scales of usual mistakes, and with the one that comes nearest to the log."""
    if not evidence.scorer.adapters:
        return
    adapter, dtype = _read(evidence, evidence.scorer.adapters.own), stored_dtype(evidence.scorer.folder)
    for what, scale in _scales(adapter.lora).items():
        flat = _base(evidence)
        _merge(evidence, flat, adapter, scale, dtype)
        yield _predicted(evidence, f"the sampler scales the adapter otherwise: {what}", flat)
    model = evidence.scorer.model()
    base = evidence.scorer.base_weights().to(model.device, model.dtype)
    share, scores = line_search(evidence, base, model.flat.detach())
    what = f"the sampler scales the adapter by {share:.2g} of its own scale"
    yield Prediction(what, scores, SEARCHED_SHARES)


def merged_otherwise(evidence: Evidence) -> Iterator[Prediction]:
    """Another dtype of the merge; A and B in 16 bits; and a base that earlier merges have changed."""
    named = evidence.scorer.adapters
    if not named:
        return
    own, stored = _read(evidence, named.own), stored_dtype(evidence.scorer.folder)
    for name, dtype in DTYPES.items():
        if dtype != stored:
            flat = _base(evidence)
            _merge(evidence, flat, own, own.lora.scale, dtype)
            yield _predicted(evidence, f"the sampler's adapter is merged in {name}", flat)
    history = [_read(evidence, folder) for folder in named.others]
    for name in _NARROW:
        dtype, flat = DTYPES[name], _base(evidence)
        _merge(evidence, flat, _rounded(own, dtype), own.lora.scale, dtype)
        yield _predicted(evidence, f"the sampler's A and B are in {name}, and merged in it", flat)
        if history:
            flat = _left_by(evidence, history, dtype)
            _merge(evidence, flat, own, own.lora.scale, dtype)
            what = f"the sampler's base is what merging and unmerging the other adapters in {name} left"
            yield _predicted(evidence, what, flat)


def _left_by(evidence: Evidence, adapters: Sequence[_Adapter], dtype: torch.dtype) -> torch.Tensor:
    """The base after each of the adapters was merged in `dtype` and taken away again, [numel] fp32.

    An engine that keeps one copy of the weights does so at each draw. In 16 bits both steps round, so the
    next merge finds another base.
    """
    flat = _base(evidence).to(dtype).float()
    for adapter in adapters:
        for scale in (adapter.lora.scale, -adapter.lora.scale):
            _merge(evidence, flat, adapter, scale, dtype)
    return flat


def _rounded(adapter: _Adapter, dtype: torch.dtype) -> _Adapter:
    """The adapter with A and B rounded to `dtype`, in fp32."""
    return adapter._replace(
        matrices=[x._replace(b=x.b.to(dtype).float(), a=x.a.to(dtype).float()) for x in adapter.matrices]
    )


def beside(evidence: Evidence) -> Iterator[Prediction]:
    """The base, and the adapter's product added to each output. A and B are fp32, or of the audit's dtype.

    The base is as it was, or what merging and unmerging the adapter, alone or after the others, has left.
    """
    named = evidence.scorer.adapters
    if not named:
        return
    own, history = _read(evidence, named.own), [_read(evidence, folder) for folder in named.others]
    for dtype in dict.fromkeys((torch.float32, evidence.scorer.model().dtype)):
        name = str(dtype).removeprefix("torch.")
        what = f"the sampler adds s (x A) B to x W, with A and B in {name}, and nothing is merged"
        yield _predicted(evidence, what, _base(evidence), _rounded(own, dtype))
    for name in _NARROW:
        for words, adapters in {"the adapter": [own], "all adapters in turn": [*history, own]}.items():
            what = (
                "the sampler adds s (x A) B to x W, and W is what merging and unmerging "
                f"{words} in {name} left"
            )
            yield _predicted(evidence, what, _left_by(evidence, adapters, DTYPES[name]), own)
            if not history:
                break


def _added(adapter: _Adapter) -> Hook:
    """A hook that adds the adapter's product to each output that has one, in fp32, and rounds the sum."""
    of_output: dict[str, list[tuple[str, _Matrix]]] = {}
    for matrix in adapter.matrices:
        prefix, _, weight = matrix.weight.rpartition(".")
        output, read = _PLACES[weight]
        of_output.setdefault(f"{prefix}.{output}", []).append((f"{prefix}.{read}", matrix))
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str, y: torch.Tensor) -> None:
        seen[name] = y
        for read, matrix in of_output.get(name, ()):
            x = seen[read].reshape(len(y), -1).float()
            part = y.view(len(y), -1)[:, matrix.rows]
            a, b = (t.to(x.device) for t in (matrix.a, matrix.b))
            part.copy_(part.float() + adapter.lora.scale * ((x @ a.t()) @ b.t()))

    return hook


PREDICTORS: dict[str, Callable[[Evidence], Iterator[Prediction]]] = {
    "adapter missing": missing,
    "another adapter": another_adapter,
    "adapter scaled otherwise": another_scale,
    "adapter merged otherwise": merged_otherwise,
    "adapter beside the weights": beside,
}
