"""The rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ....kernels.rope import rope_frequencies
from ....kernels.rope_scaling import attention_factor
from ....model.operation import Equation
from ....model.operations import input_names, known_operation, layer_of, operation, split_name
from ..changed_operation import Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """Another base, no scaling, other positions, pairs in place of halves, a norm before it."""
    op, exact, lookup, trace = traced.op, traced.exact, traced.lookup, traced.trace
    checkpoint, (prefix, _) = exact.checkpoint.config, split_name(op)
    config = checkpoint.rotating(layer_of(op))
    (name,) = input_names(op, config)
    x, theta = lookup(name).double(), config.rope_theta
    rope = partial(exact.rope, factor=attention_factor(config.rope_scaling))
    yield "no position is encoded: its outputs are its inputs", x
    if config.rope_scaling is not None:
        kind = config.rope_scaling["rope_type"]
        plain = rope_frequencies(config.rotary_dim, theta)
        yield f"the scaling of the rotary embedding ({kind}) is left out", rope(x, plain)
        if (factor := attention_factor(config.rope_scaling)) != 1.0:
            words = f"the factor of cos and sin ({factor:g}, of {kind}) is left out"
            yield words, exact.rope(x, config.frequencies)
    usual = (theta * 2, theta / 2, theta * 10, theta / 10, 1e4, 5e5, 1e6, 5e6, 1e7, theta * 4, theta / 4)
    for other in usual:
        frequencies = replace(config, rope_theta=other).frequencies
        yield f"rope_theta is {other:g}, the checkpoint's is {theta:g}", rope(x, frequencies)
    for shift in (1, -1, len(exact.prompt), -len(exact.prompt)):
        yield f"the positions are shifted by {shift:+d}", rope(x, config.frequencies, shift)
    yield (
        "neighbouring elements are rotated in pairs, where the checkpoint rotates the halves of a head",
        rope(x, config.frequencies, interleaved=True),
    )
    (norm,) = known_operation(op).reads
    has_norm = norm in operation(op, config).reads
    if not has_norm and prefix + norm in trace:
        normed = lookup(prefix + norm).double()
        yield f"{norm} comes before it, which the checkpoint lacks", rope(normed, config.frequencies)
    if has_norm:
        (raw,) = input_names(prefix + norm, config)
        yield f"{norm} is missing before it", rope(lookup(raw).double(), config.frequencies)


def theta_doubled(model: torch.nn.Module) -> None:
    """The frequencies of twice the base, from their formula."""
    rotary, config = model.model.rotary_emb, model.config
    theta = 2 * config.rope_parameters["rope_theta"]
    exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    rotary.inv_freq.copy_(theta**-exponent)


def factor_dropped(model: torch.nn.Module) -> None:
    """YaRN's factor of cos and sin is not read."""
    model.model.rotary_emb.attention_scaling = 1.0


CHANGED = ChangedOperation(
    equations=(Equation.ROPE,),
    changes=changes,
    plants=(
        ModelPlant(theta_doubled, "layers.0.q_rope", "rope_theta is 20000, the checkpoint's is 10000"),
        ModelPlant(factor_dropped, "layers.0.q_rope", "the factor of cos and sin", "gpt_oss"),
    ),
)
