"""The model's LoRA adapter: read, rounded, merged into the base, or beside it.

    y = x W'^T,  W' = round(W + s B A)          the model, with the adapter merged in once
    y = x W^T + s (x A^T) B^T                   the adapter beside the weights

The candidates are computed exactly, by our decoder, from the base W and the adapter. They are rounded as the
model's own weights are stored, where a hypothesis does not say otherwise.

Shapes: W [N, K]; A [r, K]; B [N, r]; x [T, K]; y [T, N].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.merge import merge
from ...model.adapters import AdapterLayout, adapted_layout
from ...model.context import Hook
from ...model.lora import Lora
from ...model.peft import read_adapter, stored_lora
from .evidence import Evidence
from .other_weights import with_weights
from .prediction import Prediction
from .scores import decoder_scores

NARROW = ("bfloat16", "float16")

# By the name of a weight in its layer: the operation that it computes, and the one that this reads.
_PLACES = {
    "qkv": ("qkv", "input_norm"),
    "o": ("o_proj", "attention"),
    "gate_up": ("gate_up", "post_norm"),
    "down": ("down_proj", "silu_mul"),
}


class Matrix(NamedTuple):
    """One matrix of the checkpoint that has an adapter."""

    name: str  # in the checkpoint
    weight: str  # of the decoder, of which the matrix is the part `rows`
    rows: slice
    b: torch.Tensor
    a: torch.Tensor


class Adapter(NamedTuple):
    """An adapter's settings, and its matrices."""

    lora: Lora
    matrices: list[Matrix]


def read(evidence: Evidence, folder: Path) -> Adapter:
    """The adapter of a PEFT folder, for the evidence's model. Raises ValueError (see read_adapter)."""
    lora = stored_lora(folder)
    layout = AdapterLayout(adapted_layout(evidence.scorer.model().config, lora), lora)
    views = layout.views(read_adapter(folder, layout))
    matrices = [
        Matrix(f"{x.module}.weight", x.weight.name, x.rows, views[x.b.name], views[x.a.name])
        for x in layout.adapters
    ]
    return Adapter(lora, matrices)


def base_weights(evidence: Evidence) -> torch.Tensor:
    """The base's weights, flat as the model's, in fp32 on the host. It is a tensor of its own."""
    return evidence.scorer.base_weights()


def merge_into(
    evidence: Evidence, flat: torch.Tensor, adapter: Adapter, scale: float, dtype: torch.dtype
) -> None:
    """Merge the adapter, times `scale`, into `flat` [numel] fp32; each merged matrix is of `dtype`."""
    views = evidence.scorer.model().layout.checkpoint_views(flat)
    for matrix in adapter.matrices:
        w = views[matrix.name]
        merged = torch.empty_like(w, dtype=dtype)
        merge(merged, w, matrix.b, matrix.a, scale)
        w.copy_(merged)


def predicted(evidence: Evidence, what: str, flat: torch.Tensor, beside: Adapter | None = None) -> Prediction:
    """The log of these weights, [numel] fp32, in the audit's dtype. beside: an adapter that is not merged."""
    model = evidence.scorer.model()
    decoder = with_weights(evidence, flat.to(model.device, model.dtype))
    hook_of = (lambda _: _added(beside)) if beside else None
    return Prediction(what, decoder_scores(decoder, evidence, hook_of=hook_of))


def left_by(evidence: Evidence, adapters: Sequence[Adapter], dtype: torch.dtype) -> torch.Tensor:
    """The base after each of the adapters was merged in `dtype` and taken away again, [numel] fp32.

    An engine that keeps one copy of the weights does so at each draw. In 16 bits both steps round, so the
    next merge finds another base.
    """
    flat = base_weights(evidence).to(dtype).float()
    for adapter in adapters:
        for scale in (adapter.lora.scale, -adapter.lora.scale):
            merge_into(evidence, flat, adapter, scale, dtype)
    return flat


def rounded(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The adapter with A and B rounded to `dtype`, in fp32."""
    return adapter._replace(
        matrices=[x._replace(b=x.b.to(dtype).float(), a=x.a.to(dtype).float()) for x in adapter.matrices]
    )


def _added(adapter: Adapter) -> Hook:
    """A hook that adds the adapter's product to each output that has one, in fp32, and rounds the sum."""
    by_output: dict[str, list[tuple[str, Matrix]]] = {}
    for matrix in adapter.matrices:
        prefix, _, weight = matrix.weight.rpartition(".")
        output, source = _PLACES[weight]
        by_output.setdefault(f"{prefix}.{output}", []).append((f"{prefix}.{source}", matrix))
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str, y: torch.Tensor) -> None:
        seen[name] = y
        for source, matrix in by_output.get(name, ()):
            x = seen[source].reshape(len(y), -1).float()
            part = y.view(len(y), -1)[:, matrix.rows]
            a, b = (t.to(x.device) for t in (matrix.a, matrix.b))
            part.copy_(part.float() + adapter.lora.scale * ((x @ a.t()) @ b.t()))

    return hook
