"""merge on Triton, interpreted: the bits of the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.merge import merge, merge_ref

from tests.helpers import DTYPES, property_settings, randn


def operands(N: int, K: int, rank: int, seed: int) -> list[torch.Tensor]:
    return [randn(seed, N, K) * 0.02, randn(seed + 1, N, rank) * 0.05, randn(seed + 2, rank, K) * 0.1]


@property_settings(20)
@given(
    N=st.integers(1, 40),
    K=st.integers(1, 300),
    rank=st.integers(1, 9),
    s=st.sampled_from([2.0, 32 / 3]),
    base=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_triton_has_the_bits_of_the_reference(N, K, rank, s, base, dtype, seed):
    w, b, a = operands(N, K, rank, seed)
    w = w.to(base)
    y, expected = (torch.full(w.shape, torch.nan, dtype=dtype) for _ in range(2))
    merge(y, w, b, a, s)
    merge_ref(expected, w, b, a, s)
    assert count_unequal(y, expected) == 0


def test_control_a_fused_product_and_sum_would_have_other_bits():
    w, b, a = operands(40, 300, 4, 0)
    y, total = torch.empty_like(w), torch.zeros_like(w)
    for i in range(4):
        total = (total.double() + b[:, i : i + 1].double() * a[i].double()).float()
    merge(y, w, b, a, 2.0)
    assert count_unequal(y, w + total * 2.0) > 0
