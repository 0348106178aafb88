"""AdamW on Triton, interpreted: each operation is rounded exactly, in the reference's order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.adamw import AdamW, adamw, adamw_ref

from tests.helpers import property_settings, randn, total_unequal

NUMBERS = AdamW(0.37, 3e-4, 0.9, 0.95, 1 - 0.9**3, 1 - 0.95**3, 1e-8)


def _state(n: int, seed: int) -> list[torch.Tensor]:
    master, first, grad = (randn(seed + i, n) for i in range(3))
    return [master, first * 1e-2, randn(seed + 3, n).square() * 1e-4, grad * 1e-2]


def rounded_adamw(
    master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, numbers: AdamW
) -> list[torch.Tensor]:
    """adamw_ref in numpy, which rounds every operation exactly; torch's square root on a CPU does not."""
    a = AdamW(*map(np.float32, numbers))
    rest1, rest2 = np.float32(1.0 - numbers.beta1), np.float32(1.0 - numbers.beta2)
    w, m, v, g = (x.numpy() for x in (master, first, second, grad))
    g = g * a.grad_scale
    m, v = m * a.beta1 + g * rest1, v * a.beta2 + g * g * rest2
    w = w - (m / a.correction1) / (np.sqrt(v / a.correction2) + a.eps) * a.lr
    return [torch.from_numpy(x) for x in (w, m, v)]


@property_settings(20)
@given(
    n=st.integers(1, 5000),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    updates=st.integers(1, 500),
    grad_scale=st.floats(1e-4, 4.0),
    lr=st.floats(1e-6, 1e-1),
)
def test_triton_rounds_each_operation(n, seed, dtype, updates, grad_scale, lr):
    numbers = AdamW(grad_scale, lr, 0.9, 0.95, 1 - 0.9**updates, 1 - 0.95**updates, 1e-8)
    state, out = _state(n, seed), None if dtype is None else torch.zeros(n, dtype=dtype)
    expected, reference = rounded_adamw(*state, numbers), _state(n, seed)
    adamw(*state, numbers, out)
    adamw_ref(*reference, numbers)
    assert total_unequal(state[:3], expected) == 0
    assert total_unequal(state[1:], reference[1:]) == 0, "the moments have no square root"
    if out is not None:
        assert total_unequal([out], [state[0].to(dtype)]) == 0


@pytest.mark.parametrize("changed", [{"eps": 1e-6}, {"grad_scale": 0.370001}, {"correction2": 0.2}])
def test_control_another_number_changes_bits(changed):
    state = _state(1000, 0)
    expected = rounded_adamw(*state, NUMBERS._replace(**changed))
    adamw(*state, NUMBERS)
    assert total_unequal(state[:3], expected) > 0


def test_control_a_fused_product_and_sum_would_have_other_bits():
    master, first, second, grad = _state(4000, 0)
    g = grad * NUMBERS.grad_scale
    fused = (first.double() * NUMBERS.beta1 + (g * (1.0 - NUMBERS.beta1)).double()).float()
    adamw(master, first, second, grad, NUMBERS)
    assert total_unequal([first], [fused]) > 0
