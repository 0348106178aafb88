"""Latent attention: how its part of a head is rotated, and the scale of its scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ....model.operations import operation
from ..changed_operation import Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """Pairs and halves exchanged; another scale."""
    exact, inputs = traced.exact, traced.inputs
    row = operation(traced.op, exact.checkpoint.config)
    if row.equation is Equation.LATENT_ROPE:
        words = "rope_interleave is the other: neighbours are rotated for halves, or halves for neighbours"
        yield words, exact.latent_rope(traced.op, inputs, exchanged=True)
        return
    usual = exact.checkpoint.config.head_dim**-0.5
    if row.factor != usual:
        yield "YaRN's mscale_all_dim is left out of the scale", exact.latent_attention(row, inputs, usual)
    for words, factor in (("twice the usual", 2.0), ("half the usual", 0.5)):
        scores = exact.latent_attention(row, inputs, factor * row.factor)
        yield f"the scores are scaled by {words}", scores


def interleave_ignored(model: torch.nn.Module) -> None:
    """Neighbours are rotated where the checkpoint rotates halves, or the other way."""
    model.config.rope_interleave = not model.config.rope_interleave


def mscale_dropped(model: torch.nn.Module) -> None:
    """The scale of the scores without YaRN's factor."""
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


CHANGED = ChangedOperation(
    equations=(Equation.LATENT_ROPE, Equation.LATENT_ATTENTION),
    changes=changes,
    plants=(
        ModelPlant(interleave_ignored, "layers.0.q_rope", "rope_interleave is the other", "deepseek_v3"),
        ModelPlant(mscale_dropped, "layers.0.attention", "YaRN's mscale_all_dim is left out", "deepseek_v3"),
    ),
)
