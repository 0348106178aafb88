"""polar: accuracy against fp64 beside torch's Muon, the law, and controls that change the bits."""

import pytest
import torch
from zerokl.files.bitwise import count_unequal
from zerokl.kernels import polar as module
from zerokl.kernels.polar import polar

from tests.helpers import assert_at_most_twice_the_error, randn, threads

SHAPES = [(64, 64), (96, 40), (40, 96), (2, 33), (300, 7)]


def by_torch(m: torch.Tensor, iterations: int, monkeypatch) -> torch.Tensor:
    """torch.optim.Muon's, in the dtype of m: its rounding to bf16 is left out."""
    weight = torch.zeros_like(m, requires_grad=True)
    weight.grad = m
    settings = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "ns_steps": iterations}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        torch.optim.Muon([weight], lr=1.0, **settings).step()
    ratio = max(1.0, m.shape[0] / m.shape[1]) ** 0.5
    return -weight.detach() / ratio


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_the_error_is_at_most_twice_that_of_torch(shape, scale, monkeypatch):
    m = randn(0, *shape, scale=scale)
    exact = by_torch(m.double(), 5, monkeypatch)
    assert_at_most_twice_the_error(polar(m, 5), by_torch(m, 5, monkeypatch), exact, str(shape))


def test_threads_and_where_a_matrix_lies_decide_no_bit():
    m = randn(1, 96, 160)
    with threads(1):
        alone = polar(m, 5)
    with threads(3):
        assert count_unequal(polar(m, 5), alone) == 0
    shifted = torch.zeros(3 + m.numel())[3:].view(m.shape).copy_(m)
    assert count_unequal(polar(shifted, 5), alone) == 0
    assert count_unequal(polar(m.t(), 5), alone.t()) == 0


def test_control_another_number_or_order_of_products_has_other_bits(monkeypatch):
    m = randn(2, 96, 160)
    expected = polar(m, 5)
    assert count_unequal(polar(m, 4), expected) > 0
    product = module.matmul
    monkeypatch.setattr(module, "matmul", lambda x, w: product(x.flip(1), w.flip(1)))
    assert count_unequal(polar(m, 5), expected) > 0


def test_a_matrix_of_zeros_has_a_step_of_zeros():
    assert not polar(torch.zeros(5, 9), 5).any()
