"""Budget-relative advantages equal the paper's equations in rational numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.loss.budget_relative import budget_relative_advantages

from tests.helpers import property_settings


@st.composite
def groups(draw):
    """Rewards [G][m], weights [m], and which thoughts are trained on [G]."""
    G, m = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10, width=32))
    rewards = draw(st.lists(st.lists(reward, min_size=m, max_size=m), min_size=G, max_size=G))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, 3.0]), min_size=m, max_size=m).filter(any))
    return rewards, weights, draw(st.lists(st.booleans(), min_size=G, max_size=G))


def slow(rewards: list[list[float]], weights: list[float], g: int, j: int, trained: list[bool]) -> float:
    """Of thought g at budget j, which counts from 1. The decay is that of the paper, lambda = 1/2."""
    m, decay = len(weights), Fraction(1, 2)
    P = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]

    def value(i: int) -> Fraction:
        return sum((P[k] * Fraction(rewards[i][k]) for k in range(j - 1, m)), Fraction(0))

    group = [value(i) for i in range(len(rewards)) if trained[i]]
    v2 = sum(group) / len(group)
    v1 = Fraction(0)
    if j > 1:
        decays = [decay ** (j - 1 - k) for k in range(1, j)]
        earned = sum(d * Fraction(r) for d, r in zip(decays, rewards[g], strict=False))
        v1 = earned / sum(decays) * sum(P[j - 1 :])
    return float(value(g) - Fraction(j - 1, m) * v1 - Fraction(m - j + 1, m) * v2)


@property_settings(200)
@given(groups())
def test_the_advantages_equal_the_equations(group):
    rewards, weights, trained = group
    A = budget_relative_advantages(np.array(rewards), weights, np.array(trained))
    for g in range(len(rewards)):
        for j in range(1, len(weights) + 1):
            expected = slow(rewards, weights, g, j, trained) if trained[g] else 0.0
            assert A[g, j - 1] == pytest.approx(expected, rel=1e-12, abs=1e-13)


@property_settings(100)
@given(st.permutations(range(6)))
def test_the_order_of_the_thoughts_decides_no_bit(order):
    rewards = np.array([[0.1 * (g + 1) ** j % 1.0 for j in range(4)] for g in range(6)])
    A = budget_relative_advantages(rewards, [0.1, 0.2, 0.3, 0.4])
    assert (budget_relative_advantages(rewards[order], [0.1, 0.2, 0.3, 0.4]) == A[order]).all()


def test_with_one_budget_it_is_the_reward_minus_the_groups_mean():
    A = budget_relative_advantages(np.array([[1.0], [0.0], [0.0], [0.0]]), [7.0])
    assert A.tolist() == [[0.75], [-0.25], [-0.25], [-0.25]]


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.5], [0.0, 0.0], [1.0, float("nan")]], ids=str)
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="must be 2 numbers, none below 0 and one above 0"):
        budget_relative_advantages(np.zeros((3, 2)), weights)
