"""Attention: its mask, its scale, its heads, its cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.attention_rule import AttentionRule
from ....model.operation import Equation
from ....model.operations import operation
from ..changed_operation import E4M3, E5M2, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """No mask, another scale, other key-value heads, a cache in 8 bits, another window, no cap."""
    exact, (q, k, v) = traced.exact, traced.inputs
    c = exact.checkpoint.config
    row = operation(traced.op, c)
    usual, rule = row.factor, AttentionRule(0, row.window, row.cap)
    unmasked = exact.attention(q, k, v, usual, causal=False, rule=rule)
    yield "no causal mask: tokens read later tokens", unmasked
    scales = {
        "1": 1.0,
        "1 / head_dim": 1 / c.head_dim,
        "twice the usual": 2 * usual,
        "half the usual": usual / 2,
    }
    for words, scale in scales.items():
        yield f"the scores are scaled by {words}", exact.attention(q, k, v, scale, rule=rule)
    if 1 < c.kv_heads < c.heads:
        words = "query head i reads key-value head i modulo their number, and not its group's"
        yield words, exact.attention(q, k, v, usual, tiled=True, rule=rule)
    for name, dtype in (("fp8 e4m3", E4M3), ("fp8 e5m2", E5M2)):
        k8, v8 = (x.to(dtype).double() for x in (k, v))
        cached = exact.attention(q, k8, v8, usual, rule=rule)
        yield f"keys and values are rounded to {name}: the cache's dtype", cached
    if rule.window:
        widths = {"all keys": 0, "one key more": rule.window + 1, "one key less": rule.window - 1}
        for words, window in widths.items():
            other = rule._replace(window=window)
            yield f"its window of {rule.window} keys is {words}", exact.attention(q, k, v, usual, rule=other)
    if rule.cap:
        uncapped = exact.attention(q, k, v, usual, rule=rule._replace(cap=0.0))
        yield f"the cap of the scores ({rule.cap:g}) is left out", uncapped


def another_scale(model: torch.nn.Module) -> None:
    """1 / head_dim in place of its root."""
    model.model.layers[2].self_attn.scaling = 1 / 16


CHANGED = ChangedOperation(
    equations=(Equation.ATTENTION,),
    changes=changes,
    plants=(ModelPlant(another_scale, "layers.2.attention", "scaled by 1 / head_dim"),),
)
