"""The semantic entropy of a group equals its definition, and scales the group's advantages."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from zerokl.engine.train.losses.semantic_entropy import (
    normalised_entropy,
    scaled_by_entropy,
    semantic_entropy,
)

CLASSES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(CLASSES)
@example([3])
def test_the_entropy_is_that_of_the_shares_of_the_classes(classes):
    shares = [np.mean(np.array(classes) == c) for c in set(classes)]
    expected = -sum(p * math.log(p) for p in shares)
    assert semantic_entropy(classes) == pytest.approx(expected, rel=1e-13, abs=1e-14)
    assert 0.0 <= normalised_entropy(classes) <= 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_both_ends_are_exact(n):
    """So a group of one meaning keeps every bit of its advantages."""
    assert normalised_entropy([5] * n) == 0.0
    assert normalised_entropy(range(n)) == (1.0 if n > 1 else 0.0)


def test_neither_the_order_nor_the_numbers_of_the_classes_decide_a_bit():
    classes, random = [c for c in range(40) for _ in range(1 + c * c % 17)], Random(0)
    expected = normalised_entropy(classes)
    for _ in range(50):
        random.shuffle(classes)
        assert normalised_entropy([9 - 2 * c for c in classes]) == expected


def test_each_group_is_scaled_by_its_own_entropy():
    A = np.array([[0.75, -0.75, 0.0], [0.5, 0.5, -1.0], [1.0, -1.0, 0.0]])
    groups = [[0, 0, 0], [0, 1, 2], [0, 1]]  # of the last group a completion is not trained on
    assert scaled_by_entropy(A, groups, 0.25).tolist() == (A * [[1.0], [0.75], [0.75]]).tolist()
    two_to_one = scaled_by_entropy(A, [[0, 0, 1]] * 3, 0.25)[0, 0]
    p = np.array([2 / 3, 1 / 3])
    assert two_to_one == pytest.approx(0.75 * (1 + 0.25 * (p * np.log(p)).sum() / np.log(3)), rel=1e-14)
