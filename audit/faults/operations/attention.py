"""Attention: its mask, its scale, its heads, its cache, its sinks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ....kernels.attention_rule import AttentionRule
from ....model.operation import Equation
from ....model.operations import operation
from ..changed_operation import E4M3, E5M2, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """No mask, another scale, other key-value heads, a cache in 8 bits, another window, no cap, no sinks."""
    exact, (q, k, v) = traced.exact, traced.inputs
    c = exact.checkpoint.config
    row = operation(traced.op, c)
    usual, rule = row.factor, AttentionRule(0, row.window, row.cap)
    sinks = exact.sinks(traced.op)
    attend = partial(exact.attention, rule=rule, sinks=sinks)
    yield "no causal mask: tokens read later tokens", attend(q, k, v, usual, causal=False)
    scales = {
        "1": 1.0,
        "1 / head_dim": 1 / c.head_dim,
        "twice the usual": 2 * usual,
        "half the usual": usual / 2,
    }
    for words, scale in scales.items():
        yield f"the scores are scaled by {words}", attend(q, k, v, scale)
    if 1 < c.kv_heads < c.heads:
        words = "query head i reads key-value head i modulo their number, and not its group's"
        yield words, attend(q, k, v, usual, tiled=True)
    for name, dtype in (("fp8 e4m3", E4M3), ("fp8 e5m2", E5M2)):
        k8, v8 = (x.to(dtype).double() for x in (k, v))
        yield f"keys and values are rounded to {name}: the cache's dtype", attend(q, k8, v8, usual)
    if rule.window:
        widths = {"all keys": 0, "one key more": rule.window + 1, "one key less": rule.window - 1}
        for words, window in widths.items():
            other = rule._replace(window=window)
            yield f"its window of {rule.window} keys is {words}", attend(q, k, v, usual, rule=other)
    if rule.cap:
        uncapped = attend(q, k, v, usual, rule=rule._replace(cap=0.0))
        yield f"the cap of the scores ({rule.cap:g}) is left out", uncapped
    if sinks is not None:
        yield "the sinks are left out", attend(q, k, v, usual, sinks=None)
        yield "each sink is 0", attend(q, k, v, usual, sinks=torch.zeros_like(sinks))


def another_scale(model: torch.nn.Module) -> None:
    """1 / head_dim in place of its root."""
    model.model.layers[2].self_attn.scaling = 1 / 16


def sinks_dropped(model: torch.nn.Module) -> None:
    """Sinks so low that they add nothing to any sum."""
    model.model.layers[0].self_attn.sinks.fill_(-1e4)


def window_off(model: torch.nn.Module) -> None:
    """The first layer has the mask of the others."""
    model.config.layer_types[0] = "full_attention"


CHANGED = ChangedOperation(
    equations=(Equation.ATTENTION,),
    changes=changes,
    plants=(
        ModelPlant(another_scale, "layers.2.attention", "scaled by 1 / head_dim"),
        ModelPlant(sinks_dropped, "layers.0.attention", "the sinks are left out", "gpt_oss"),
        ModelPlant(window_off, "layers.0.attention", "its window of 8 keys is all keys", "gpt_oss"),
    ),
)
