"""Attention: its mask, its scale, its heads, its cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ....model.operations import operation
from ..changed_operation import E4M3, E5M2, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """No mask, another scale, other key-value heads, a cache in 8 bits."""
    exact, (q, k, v) = traced.exact, traced.inputs
    c = exact.checkpoint.config
    usual = operation(traced.op, c).factor
    yield "no causal mask: tokens read later tokens", exact.attention(q, k, v, usual, causal=False)
    scales = {
        "1": 1.0,
        "1 / head_dim": 1 / c.head_dim,
        "twice the usual": 2 * usual,
        "half the usual": usual / 2,
    }
    for words, scale in scales.items():
        yield f"the scores are scaled by {words}", exact.attention(q, k, v, scale)
    if 1 < c.kv_heads < c.heads:
        words = "query head i reads key-value head i modulo their number, and not its group's"
        yield words, exact.attention(q, k, v, usual, tiled=True)
    for name, dtype in (("fp8 e4m3", E4M3), ("fp8 e5m2", E5M2)):
        k8, v8 = (x.to(dtype).double() for x in (k, v))
        yield f"keys and values are rounded to {name}: the cache's dtype", exact.attention(q, k8, v8, usual)


def another_scale(model: torch.nn.Module) -> None:
    """1 / head_dim in place of its root."""
    model.model.layers[2].self_attn.scaling = 1 / 16


CHANGED = ChangedOperation(
    equations=(Equation.ATTENTION,),
    changes=changes,
    plants=(ModelPlant(another_scale, "layers.2.attention", "scaled by 1 / head_dim"),),
)
