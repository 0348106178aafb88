"""The router's weights of given experts: those of the router's own choice, and the gradient of any others."""

import pytest
import torch
from zerokl.files.bitwise import equal
from zerokl.kernels.given_softmax import given_softmax
from zerokl.kernels.topk_softmax import topk_softmax

from tests.helpers import randn

T, E, K = 37, 12, 4


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_that_the_router_would_choose_have_its_bits(dtype, renormalise):
    dw, results = randn(2, T, K), []
    _, ids = topk_softmax(randn(1, T, E, dtype=dtype), K, renormalise)
    for by_router in (True, False):
        logits = randn(1, T, E, dtype=dtype).requires_grad_()
        if by_router:
            w = topk_softmax(logits, K, renormalise)[0]
        else:
            w = given_softmax(logits, ids, renormalise)
        w.backward(dw)
        results.append((w.detach(), logits.grad))
    assert all(equal(a, b) for a, b in zip(*results, strict=True))
    assert not equal(given_softmax(randn(1, T, E, dtype=dtype), ids.roll(1, 1), renormalise), results[0][0])


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_gradient_of_other_experts_is_that_of_their_weights(renormalise):
    """Against torch's own gradient in fp64."""
    ids = randn(3, T, E).argsort(1)[:, :K].contiguous()
    dw, grads = randn(2, T, K, dtype=torch.float64), []
    for ours in (True, False):
        logits = randn(1, T, E, dtype=torch.float64).requires_grad_()
        w = given_softmax(logits, ids, renormalise) if ours else logits.softmax(1).gather(1, ids)
        if renormalise and not ours:
            w = w / w.sum(1, keepdim=True)
        w.backward(dw)
        grads.append(logits.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(T, K), "in int64"),
        (torch.zeros(T - 1, K, dtype=torch.int64), r"must be \[T, E\]"),
        (torch.full((T, K), E), r"ids must be in 0\.\.11"),
    ],
)
def test_refusals(ids, message):
    with pytest.raises(ValueError, match=message):
        given_softmax(torch.zeros(T, E), ids, True)
