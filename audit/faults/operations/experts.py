"""The routing of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.operation import Equation
from ..changed_operation import SHORT, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """Another normalisation, another rule for ties, a router in 16 bits, more or fewer experts."""
    op, exact, (x, logits) = traced.op, traced.exact, traced.inputs
    c = exact.checkpoint.config.experts
    routings = {
        (
            "norm_topk_prob is lost: the routing weights are not divided by their sum"
            if c.renormalise
            else "the routing weights are divided by their sum, and norm_topk_prob is false"
        ): exact.routing(op, logits, renormalise=not c.renormalise),
        "of equally likely experts it takes the one with the higher index": exact.routing(
            op, logits, lower_wins=False
        ),
        "the routing weights are left out": (exact.routing(op, logits) > 0).to(exact.wide),
    }
    if c.sigmoid is not None:
        lost = "e_score_correction_bias is lost: the choice of experts is not corrected"
        routings[lost] = exact.routing(op, logits, corrected=False)
        lost = f"routed_scaling_factor ({c.sigmoid.scale:g}) is lost"
        routings[lost] = exact.routing(op, logits, scaled=False)
    for dtype, name in SHORT.items():
        routings[f"it chooses and weighs experts by router logits in {name}"] = exact.routing(
            op, logits.to(dtype)
        )
    for k in (c.per_token - 1, c.per_token + 1):
        if 1 <= k <= c.number:
            words = f"a token has {k} experts, the checkpoint's {c.per_token}"
            routings[words] = exact.routing(op, logits, per_token=k)
    for words, routing in routings.items():
        yield words, exact.experts(op, x, routing)


def sum_of_weights_lost(model: torch.nn.Module) -> None:
    """norm_topk_prob is not read."""
    model.model.layers[1].mlp.gate.norm_topk_prob = False


def three_experts(model: torch.nn.Module) -> None:
    """One expert more than the checkpoint says."""
    model.model.layers[1].mlp.gate.top_k = 3


CHANGED = ChangedOperation(
    equations=(Equation.EXPERTS,),
    changes=changes,
    plants=(
        ModelPlant(sum_of_weights_lost, "layers.1.experts", "norm_topk_prob is lost"),
        ModelPlant(three_experts, "layers.1.experts", "a token has 3 experts"),
    ),
)
