"""merge: the order of the sum by definition, the law, and accuracy against fp64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.merge import merge, swallowed_rows

from tests.helpers import DTYPES, assert_at_most_twice_the_error, property_settings, randn, threads


def operands(N: int, K: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list:
    """w, b and a of about the sizes that training gives them."""
    w, b, a = randn(seed, N, K) * 0.02, randn(seed + 1, N, rank) * 0.05, randn(seed + 2, rank, K) * 0.1
    return [w.to(dtype), b, a]


def merged(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float, dtype: torch.dtype) -> torch.Tensor:
    y = torch.full(w.shape, torch.nan, dtype=dtype)
    merge(y, w, b, a, s)
    return y


def by_definition(
    w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float, dtype: torch.dtype, order: list[int]
) -> torch.Tensor:
    """The merged weight in numpy, which rounds every operation; the sum over the rank in this order."""
    w, b, a = w.float().numpy(), b.numpy(), a.numpy()
    total = np.zeros_like(w)
    for i in order:
        total = total + b[:, i : i + 1] * a[i]
    return torch.from_numpy(w + total * np.float32(s)).to(dtype)


@property_settings(40)
@given(
    N=st.integers(1, 70),
    K=st.integers(1, 70),
    rank=st.integers(1, 17),
    s=st.sampled_from([1.0, 2.0, 32 / 3, 0.1]),
    base=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_every_operation_is_rounded_in_the_order_of_the_rank(N, K, rank, s, base, dtype, seed):
    w, b, a = operands(N, K, rank, seed, base)
    expected = by_definition(w, b, a, s, dtype, list(range(rank)))
    assert count_unequal(merged(w, b, a, s, dtype), expected) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_control_another_order_of_the_sum_has_other_bits(dtype):
    w, b, a = operands(64, 64, 16)
    y = merged(w, b * 20, a, 2.0, dtype)
    assert count_unequal(y, by_definition(w, b * 20, a, 2.0, dtype, list(range(16)))) == 0
    assert count_unequal(y, by_definition(w, b * 20, a, 2.0, dtype, list(range(16))[::-1])) > 0


def test_an_element_depends_on_its_own_row_and_column_only():
    w, b, a = operands(300, 500, 9)
    whole = merged(w, b, a, 2.0, torch.bfloat16)
    for start, stop in pairwise([0, 1, 2, 130, 131, 300]):
        part = slice(start, stop)
        assert count_unequal(merged(w[part], b[part], a, 2.0, torch.bfloat16), whole[part]) == 0
    columns = merged(w[:, 3:40].contiguous(), b, a[:, 3:40].contiguous(), 2.0, torch.bfloat16)
    assert count_unequal(columns, whole[:, 3:40]) == 0
    with threads(3):
        assert count_unequal(merged(w, b, a, 2.0, torch.bfloat16), whole) == 0


def test_a_zero_b_gives_the_weight_itself():
    w, b, a = operands(40, 30, 4)
    for dtype in DTYPES:
        assert count_unequal(merged(w, torch.zeros_like(b), a, 2.0, dtype), w.to(dtype)) == 0


@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_that_of_plain_torch(dtype, rank):
    w, b, a = operands(96, 160, rank)
    exact = w.double() + 2.0 * (b.double() @ a.double())
    plain = (w + 2.0 * (b @ a)).to(dtype)
    assert_at_most_twice_the_error(merged(w, b, a, 2.0, dtype), plain, exact, f"rank {rank}, {dtype}")


def test_other_shapes_are_refused():
    w, b, a = operands(4, 6, 2)
    with pytest.raises(ValueError, match=r"merge: y \(4, 6\), b \(4, 2\) and a \(2, 6\) must be"):
        merge(w.clone(), w.t().contiguous(), b, a, 1.0)
    with pytest.raises(ValueError, match="of w"):
        merge(w.clone(), w, b, randn(0, 3, 6), 1.0)


@property_settings(20)
@given(N=st.integers(1, 70), K=st.integers(1, 1100), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 100))
def test_swallowed_is_what_is_added_to_weights_that_stay_what_the_base_rounds_to(N, K, dtype, seed):
    """Beside numpy's sums in fp64, and the same rows alone."""
    w, b, a = operands(N, K, 3, seed, dtype)
    b *= 10.0 ** torch.linspace(-4, 0, N)[:, None]  # from rows that lose all to rows that lose little
    y = merged(w, b, a, 2.0, dtype)
    added = np.abs(2.0 * (b.double().numpy() @ a.double().numpy()))
    expected = np.stack([(added * (y == w).numpy()).sum(1), added.sum(1)], axis=1)
    sums = swallowed_rows(y, w, b, a, 2.0)
    assert (np.abs(sums.numpy() - expected) <= 1e-5 * expected[:, 1:]).all()
    alone = torch.cat([swallowed_rows(*(x[i : i + 1] for x in (y, w, b)), a, 2.0) for i in range(N)])
    assert count_unequal(sums, alone) == 0


def test_control_a_merge_in_fp32_swallows_less_than_one_in_bf16():
    w, b, a = operands(64, 256, 4, dtype=torch.bfloat16)
    lost = {
        dtype: (sums := swallowed_rows(merged(w, b * 0.001, a, 1.0, dtype), w, b * 0.001, a, 1.0).sum(0))[0]
        / sums[1]
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert lost[torch.float32] < 0.001 < 0.5 < lost[torch.bfloat16]
