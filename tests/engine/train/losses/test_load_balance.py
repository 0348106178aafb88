"""The load-balancing loss of a sequence beside transformers' own, and its gradient beside torch's."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from zerokl.engine.train.losses.load_balance import load_balance
from zerokl.files.bitwise import equal
from zerokl.kernels.topk_softmax import topk_softmax

from tests.helpers import randn

C, L, E, K = 29, 3, 6, 2


def choices(z: torch.Tensor) -> torch.Tensor:
    return topk_softmax(z.reshape(-1, E), K, True)[1].view(C, L, K).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_transformers_loss(dtype):
    z = randn(1, C, L, E, dtype=dtype, scale=2.0)
    expected = load_balancing_loss_func(tuple(z.float().unbind(1)), E, K)
    ours = load_balance(z, choices(z))
    assert abs(float(ours - expected)) < 1e-6
    other = choices(z)
    other[0, 0] = torch.tensor([4, 5]) if other[0, 0].max() < 4 else torch.tensor([0, 1])
    assert abs(float(load_balance(z, other) - expected)) > 1e-6, "control: other choices"


def test_its_gradient_is_torchs():
    z = randn(1, C, L, E, dtype=torch.float64, scale=2.0).requires_grad_()
    load_balance(z, choices(z.detach())).backward()
    expected = z.detach().clone().requires_grad_()
    load_balancing_loss_func(tuple(expected.unbind(1)), E, K).backward()
    assert (z.grad - expected.grad).abs().max() < 1e-6 * expected.grad.abs().max()


def test_an_even_choice_gives_k():
    z = torch.zeros(6, 1, E)
    ids = torch.tensor([[i, (i + 1) % E] for i in range(6)]).view(6, 1, 2)
    assert float(load_balance(z, ids)) == pytest.approx(K, rel=1e-6)


def test_the_gradient_of_a_step_scales_exactly():
    """So the loss scale decides no bit."""
    grads = []
    for scale in (1.0, 1024.0):
        z = randn(1, C, L, E).requires_grad_()
        (load_balance(z, choices(z.detach())) * (0.01 / 7) * scale).backward()
        grads.append(z.grad / scale)
    assert equal(*grads)


def test_scores_of_each_expert_alone_have_k_times_deepseeks_loss_and_torchs_gradient():
    z = randn(1, C, L, E, dtype=torch.float64, scale=2.0).requires_grad_()
    ids = choices(z.detach())
    load_balance(z, ids, sigmoid=True).backward()
    other = z.detach().clone().requires_grad_()
    s, R = other.sigmoid().flatten(0, 1), C * L
    P = (s / s.sum(1, keepdim=True)).sum(0) / R
    f = torch.bincount(ids.flatten().long(), minlength=E) * E / (K * R)
    (K * (f * P).sum()).backward()
    assert abs(float((load_balance(other, ids, sigmoid=True) - K * (f * P).sum()).detach())) < 1e-6
    assert (z.grad - other.grad).abs().max() < 1e-6 * other.grad.abs().max()
    scored, softmaxed = (load_balance(other.detach(), ids, sigmoid=how) for how in (True, False))
    assert float(scored) != float(softmaxed), "control"
