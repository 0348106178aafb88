"""An RMS norm: its weight, its epsilon, or all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ...operations.plain_operations import weight_names
from ..changed_operation import Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """The norm left out, another weight, another epsilon."""
    op, actual, exact = traced.op, traced.actual, traced.exact
    x = exact.norm_input(op, traced.inputs[0])
    name = weight_names(op, exact.checkpoint)[0]
    c = exact.checkpoint.config
    w, eps = exact.weight(name) + c.norm_plus_one, c.eps
    yield "the norm is missing: its outputs are its inputs", x
    yield "the weight is not applied", exact.norm(x, torch.ones_like(w), eps)
    yield "the weight is applied as 1 + weight", exact.norm(x, 1 + w, eps)
    for other in (1e-6, 1e-5, 1e-8, 0.0, 1e-3, eps * 10, eps / 10, eps * 100, eps / 100):
        yield f"eps is {other:.1g}, the checkpoint's is {eps:.1g}", exact.norm(x, w, other)
    unweighted = exact.normalised(x, len(w), eps).reshape(-1, len(w))
    columns = actual.reshape(-1, len(w))
    fitted = (columns * unweighted).sum(0) / unweighted.square().sum(0).clamp_min(1e-300)
    # A fitted weight has the rounding of its few outputs; an element counts as another one beyond a tenth.
    other = ((fitted - w).abs() > 0.1 * w.abs()).nonzero().flatten().tolist()
    if other:
        first = (
            f"element {other[0]} is {float(fitted[other[0]]):.3g}, the checkpoint's {float(w[other[0]]):.3g}"
        )
        words = f"{len(other)} of {len(w)} elements of {name} have other values ({first})"
        yield words, (unweighted * fitted).reshape(x.shape)


# --- plants: transformers' modules, changed ---


def a_norms_epsilon(model: torch.nn.Module) -> None:
    """Another epsilon in one norm."""
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3


def one_element(model: torch.nn.Module) -> None:
    """One element of a weight, three times as large."""
    model.model.layers[1].input_layernorm.weight[7:8].mul_(3)


def weight_left_out(model: torch.nn.Module) -> None:
    """A weight of ones."""
    model.model.norm.weight.fill_(1.0)


def q_norm_missing(model: torch.nn.Module) -> None:
    """A Qwen3 run as an architecture without it."""
    model.model.layers[0].self_attn.q_norm = torch.nn.Identity()


CHANGED = ChangedOperation(
    equations=(Equation.NORM,),
    changes=changes,
    plants=(
        ModelPlant(a_norms_epsilon, "layers.0.input_norm", "eps is 0.001"),
        ModelPlant(
            one_element,
            "layers.1.input_norm",
            "1 of 64 elements of model.layers.1.input_layernorm.weight have other values (element 7",
        ),
        ModelPlant(weight_left_out, "norm", "the weight is not applied"),
        ModelPlant(q_norm_missing, "layers.0.q_norm", "the norm is missing"),
    ),
)
