"""The sigmoid router beside a slow one, its rule for ties, its bad numbers, and its refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from zerokl.kernels.sigmoid_router import Choice, Weighing, sigmoid_choice, sigmoid_weights

from tests.helpers import DTYPES, property_settings, randn, total_unequal


def slow(c: list[float], choice: Choice) -> list[int]:
    """The experts of one token, from the corrected scores c."""
    size = len(c) // choice.groups
    groups = [sorted(c[g * size : (g + 1) * size], reverse=True)[:2] for g in range(choice.groups)]
    sums = [torch.tensor(two).sum().item() for two in groups]
    kept = sorted(range(choice.groups), key=lambda g: (-sums[g], g))[: choice.top_groups]
    experts = [e for e in range(len(c)) if e // size in kept]
    return sorted(experts, key=lambda e: (-c[e], e))[: choice.k]


@property_settings(60)
@given(
    seed=st.integers(0, 10_000),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    coarse=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_the_choice_is_that_of_a_slow_router_and_of_ties_the_lower_wins(seed, groups, coarse, dtype):
    choice, E = Choice(3, *groups), 12
    logits, bias = randn(seed, 5, E, dtype=dtype), randn(seed + 1, E, scale=0.5)
    if coarse:  # many equal scores
        logits, bias = logits.round(), bias.round()
    c = 1.0 / (1.0 + torch.exp(-logits.float())) + bias
    assert sigmoid_choice(logits, bias, choice).tolist() == [slow(row, choice) for row in c.tolist()]


def test_control_another_rule_for_ties_is_found():
    logits = torch.zeros(1, 8)
    ids = sigmoid_choice(logits, torch.zeros(8), Choice(2, 4, 2))
    assert ids.tolist() == [[0, 1]]
    assert sigmoid_choice(logits.flip(1), torch.zeros(8), Choice(2, 4, 2)).tolist() != (7 - ids).tolist()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
def test_choice_and_weights_are_those_of_transformers(groups, renormalise):
    config = Glm4MoeConfig(
        hidden_size=32,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalise,
        routed_scaling_factor=1.7,
    )
    router = Glm4MoeTopkRouter(config)
    router.weight.data, router.e_score_correction_bias = randn(0, 12, 32), randn(1, 12, scale=0.4)
    logits, w, ids = router(randn(2, 200, 32))
    ours = sigmoid_choice(logits, router.e_score_correction_bias, Choice(3, *groups))
    assert ours.sort(1).values.tolist() == ids.sort(1).values.tolist()
    torch.testing.assert_close(sigmoid_weights(logits, ids, Weighing(renormalise, 1.7)), w)
    unbiased = sigmoid_choice(logits, torch.zeros(12), Choice(3, *groups))
    assert unbiased.sort(1).values.tolist() != ids.sort(1).values.tolist(), "control: the bias decides"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_logit_that_is_not_finite_makes_the_weights_of_its_token_nan(dtype, renormalise, bad):
    logits, bias, how = randn(0, 3, 6, dtype=dtype), randn(1, 6), Weighing(renormalise)
    ids = sigmoid_choice(logits, bias, Choice(2))
    finite = sigmoid_weights(logits, ids, how)
    logits[1, 4] = bad
    chosen = sigmoid_choice(logits, bias, Choice(2))
    assert chosen[1].tolist() == [0, 1]
    logits.requires_grad_()
    w = sigmoid_weights(logits, chosen, how)
    assert w.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert total_unequal([w[::2].detach()], [finite[::2]]) == 0
    w.sum().backward()
    assert logits.grad.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sigmoid_choice(torch.zeros(2, 6), torch.zeros(5), Choice(1)), r"bias \(5,\)"),
        (lambda: sigmoid_choice(torch.zeros(2, 6), torch.zeros(6).bfloat16(), Choice(1)), "in float32"),
        (lambda: sigmoid_choice(torch.zeros(2, 6), torch.zeros(6), Choice(1, 4)), r"groups \(4\)"),
        (lambda: sigmoid_choice(torch.zeros(2, 6), torch.zeros(6), Choice(3, 3, 1)), "must have k"),
        (lambda: sigmoid_choice(torch.zeros(2, 6), torch.zeros(6), Choice(1, 6, 2)), "at least two"),
        (lambda: sigmoid_weights(torch.zeros(2, 6), torch.tensor([[6], [0]]), Weighing(True)), r"0\.\.5"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
