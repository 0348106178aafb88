"""The comparison of bits takes every element, looks at integer views, and has no tolerance."""

import pytest
import torch
from zerokl.files.bitwise import bits, count_unequal, ulp_distance, unequal
from zerokl.verify.invariance import Check

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_negative_zero_is_not_zero_but_its_neighbour(dtype):
    a, b = torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)
    assert torch.equal(a, b)
    assert count_unequal(a, b) == 1
    assert ulp_distance(a, b).tolist() == [1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_equals_nan_of_the_same_bits_only(dtype):
    nan = torch.tensor([float("nan")], dtype=dtype)
    other_nan = (bits(nan) + 1).view(dtype)
    assert torch.isnan(other_nan).all()
    assert count_unequal(nan, nan.clone()) == 0
    assert count_unequal(nan, other_nan) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance_counts_representable_numbers(dtype):
    x = torch.tensor([1.0, -1.0, 0.0, 3.3, -0.007], dtype=dtype)
    away_from_zero = (bits(x) + 1).view(dtype)
    assert ((away_from_zero - x).sign() == torch.tensor([1, -1, 1, 1, -1])).all()
    assert ulp_distance(x, away_from_zero).tolist() == [1] * 5
    assert ulp_distance(x, x).tolist() == [0] * 5
    smallest = torch.tensor([torch.finfo(dtype).smallest_normal], dtype=dtype)
    span = ulp_distance(smallest, 2 * smallest).item()
    assert span == round(1 / torch.finfo(dtype).eps)
    assert ulp_distance(-smallest, smallest).item() == 2 * span + 1


def test_every_unequal_element_is_counted_and_placed():
    a = torch.arange(24, dtype=torch.float32).view(4, 6)
    b = a.clone()
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(100.0))
    b[3, 5] = float("nan")
    assert unequal(a, b).nonzero().tolist() == [[1, 2], [3, 5]]
    assert count_unequal(a.t(), b.t()) == 2  # strides do not matter


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int32),
    ],
)
def test_other_shapes_and_dtypes_are_refused(other):
    for compare in (unequal, count_unequal, ulp_distance):
        with pytest.raises(ValueError, match="must have one shape and dtype"):
            compare(torch.zeros(2), other)


def test_check_holds_only_when_something_was_compared_and_nothing_differed():
    check = Check("name", "float32")
    assert not check.holds
    check.compare(torch.ones(3), torch.ones(3))
    assert check.holds
    check.compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (check.comparisons, check.unequal, check.holds) == (5, 1, False)
