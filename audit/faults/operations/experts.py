"""A mixture of experts: its routing, and the clamped activation of gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....model.blocks.clamped_experts import ClampedExperts
from ....model.operation import Equation
from ...operations.plain_operations import Clamped
from ..changed_operation import SHORT, Change, ChangedOperation, ModelPlant, Traced


def changes(traced: Traced) -> Iterator[Change]:
    """Another normalisation or rule for ties, a router in 16 bits, more or fewer experts, an activation."""
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
    if c.grouped is not None:
        lost = f"routed_scaling_factor ({c.grouped.scale:g}) is lost"
        routings[lost] = exact.routing(op, logits, scaled=False)
        lost = f"n_group ({c.grouped.groups}) is lost: experts are chosen of all groups"
        routings[lost] = exact.routing(op, logits, in_groups=False)
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
    mixture = exact.checkpoint.config.mixture
    if isinstance(mixture, ClampedExperts):
        usual, routing = Clamped(mixture.alpha, mixture.limit), exact.routing(op, logits)
        activations = {
            f"the clamp (swiglu_limit {usual.limit:g}) is left out": usual._replace(limit=torch.inf),
            f"swiglu_alpha is 1, and not {usual.alpha:g}": usual._replace(alpha=1.0),
            "no 1 is added to up": usual._replace(one=0.0),
        }
        for words, clamped in activations.items():
            yield words, exact.experts(op, x, routing, clamped)


def sum_of_weights_lost(model: torch.nn.Module) -> None:
    """norm_topk_prob is not read."""
    model.model.layers[1].mlp.gate.norm_topk_prob = False


def three_experts(model: torch.nn.Module) -> None:
    """One expert more than the checkpoint says."""
    model.model.layers[1].mlp.gate.top_k = 3


def clamp_off(model: torch.nn.Module) -> None:
    """swiglu_limit is not read."""
    model.model.layers[1].mlp.experts.limit = 1e30


def groups_lost(model: torch.nn.Module) -> None:
    """n_group is not read."""
    model.model.layers[1].mlp.gate.topk_method = "greedy"


def factor_lost(model: torch.nn.Module) -> None:
    """routed_scaling_factor is not read."""
    model.model.layers[1].mlp.gate.routed_scaling_factor = 1.0


def softmax_first(model: torch.nn.Module) -> None:
    """The softmax is over all experts, before the choice."""
    router = model.model.layers[1].mlp.router

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, router.weight, router.bias)
        return logits, *logits.softmax(-1).topk(router.top_k)

    router.forward = route


CHANGED = ChangedOperation(
    equations=(Equation.EXPERTS,),
    changes=changes,
    plants=(
        ModelPlant(sum_of_weights_lost, "layers.1.experts", "norm_topk_prob is lost"),
        ModelPlant(three_experts, "layers.1.experts", "a token has 3 experts"),
        ModelPlant(clamp_off, "layers.1.experts", "the clamp (swiglu_limit 1) is left out", "gpt_oss"),
        ModelPlant(groups_lost, "layers.1.experts", "n_group (4) is lost", "deepseek_v2"),
        ModelPlant(factor_lost, "layers.1.experts", "routed_scaling_factor (1.5) is lost", "deepseek_v2"),
        ModelPlant(softmax_first, "layers.1.experts", "norm_topk_prob is lost", "gpt_oss"),
    ),
)
