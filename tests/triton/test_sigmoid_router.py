"""The sigmoid router on Triton, interpreted, beside its reference: choices with ties, and bad numbers."""

import pytest
import torch
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.sigmoid_router import (
    Choice,
    Weighing,
    choose_ref,
    sigmoid_choice,
    sigmoid_weights,
    weigh_bwd_ref,
    weigh_ref,
)

from tests.helpers import randn

E = 12


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (3, 3), (6, 2)], ids=str)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_the_choice_is_the_references_and_of_ties_the_lower_wins(groups, bad):
    logits, bias, choice = randn(1, 9, E).round(), randn(2, E).round() / 4, Choice(3, *groups)
    logits[4, 7] = bad
    with recorded_launches(and_run=True) as launches:
        ids = sigmoid_choice(logits, bias, choice)
    assert [launch.kernel.__name__ for launch in launches] == ["_sigmoid_choose"]
    assert ids.tolist() == choose_ref(logits, bias, choice).tolist()
    higher = E - 1 - choose_ref(logits.flip(1), bias.flip(0), choice)
    assert ids.tolist() != higher.tolist(), "control: another rule for ties"


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_and_gradient_are_the_references_but_for_exp(renormalise):
    logits, how = randn(3, 9, E, scale=2.0).requires_grad_(), Weighing(renormalise, 2.5)
    ids = choose_ref(logits.detach(), torch.zeros(E), Choice(3))
    w, dw = sigmoid_weights(logits, ids, how), randn(4, 9, 3)
    w.backward(dw)
    torch.testing.assert_close(w.detach(), weigh_ref(logits.detach(), ids, how), rtol=1e-6, atol=1e-7)
    expected = weigh_bwd_ref(dw, logits.detach(), ids, how)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)
    assert (logits.grad != 0).sum() == 27
