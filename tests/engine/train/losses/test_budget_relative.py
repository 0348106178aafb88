"""Budget-relative advantages equal the paper's equations in rational numbers, token by token."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.budget_cuts import Cuts
from zerokl.engine.train.losses import budget_relative
from zerokl.engine.train.losses.budget_relative import budget_relative_advantages, cut_advantages

from tests.helpers import property_settings


@st.composite
def groups(draw):
    """Rewards [G][m] and weights [m]."""
    G, m = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10, width=32))
    rewards = draw(st.lists(st.lists(reward, min_size=m, max_size=m), min_size=G, max_size=G))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, 3.0]), min_size=m, max_size=m).filter(any))
    return rewards, weights


def slow(rewards: list[list[float]], weights: list[float], g: int, j: int) -> float:
    """Of thought g at budget j, which counts from 1. The decay is that of the paper, lambda = 1/2."""
    m, decay = len(weights), Fraction(1, 2)
    P = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]

    def value(i: int) -> Fraction:
        return sum((P[k] * Fraction(rewards[i][k]) for k in range(j - 1, m)), Fraction(0))

    group = [value(i) for i in range(len(rewards))]
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
    rewards, weights = group
    A = budget_relative_advantages(np.array(rewards), weights)
    for g in range(len(rewards)):
        for j in range(1, len(weights) + 1):
            expected = slow(rewards, weights, g, j)
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


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.1, 0.2, 0.7)])
def test_equal_rewards_give_no_gradient_at_all(weights):
    cuts, lengths = Cuts(2, (1, 2, 4), weights, 3), np.full((1, 2 + 2 * 9), 1)
    rewards = cuts.with_reasonings(np.full((1, 18), 0.1))
    assert not any(A.any() for A in cut_advantages(rewards, lengths, cuts))
    solved = cuts.with_reasonings(np.ones((1, 18)))
    assert (solved == 1.0).all(), "a solved reasoning has the reward 1, whatever the weights"


@st.composite
def steps(draw):
    """Cuts, the rewards of the answers [P][G][m][n], and the drawn tokens of all rollouts [P][S]."""
    P, G, m, n = (draw(st.integers(1, high)) for high in (2, 3, 4, 3))
    budgets = sorted(draw(st.sets(st.integers(1, 9), min_size=m, max_size=m)))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, 3.0]), min_size=m, max_size=m).filter(any))
    cuts = Cuts(G, tuple(budgets), tuple(weights), n)
    reward = st.sampled_from([0.0, 1.0, 0.5, -0.75])
    rewards = draw(st.lists(reward, min_size=P * G * m * n, max_size=P * G * m * n))
    thought_length, answer_length = st.integers(1, budgets[-1]), st.integers(1, 3)
    lengths = [
        [draw(thought_length) for _ in range(G)] + [draw(answer_length) for _ in range(G * m * n)]
        for _ in range(P)
    ]
    return cuts, np.array(rewards).reshape(P, G, m, n), lengths


def tokens_one_by_one(cuts: Cuts, rewards: np.ndarray, lengths: list[list[int]]) -> list[list[float]]:
    """The advantage of each token of each rollout, from the definition of a cut."""
    A, (P, G, m, n) = [], rewards.shape
    for p in range(P):
        means = [[float(rewards[p, g, j].mean()) for j in range(m)] for g in range(G)]
        for g in range(G):
            advantages = []
            for c in range(lengths[p][g]):
                cut = next(j for j, budget in enumerate(cuts.budgets) if c in range(lengths[p][g])[:budget])
                advantages.append(slow(means, list(cuts.weights), g, cut + 1))
            A.append(advantages)
        for g, j, k in np.ndindex(G, m, n):
            kept = [len(range(lengths[p][g])[:budget]) for budget in cuts.budgets]
            group = [Fraction(r) for i in range(m) if kept[i] == kept[j] for r in rewards[p, g, i]]
            a = float(Fraction(rewards[p, g, j, k]) - sum(group) / len(group))
            A.append([a] * lengths[p][cuts.sample(g, j, k)])
    return A


def check(cuts: Cuts, rewards: np.ndarray, lengths: list[list[int]]) -> None:
    P, G = rewards.shape[:2]
    all_rewards = cuts.with_reasonings(rewards.reshape(P, -1))
    share = [Fraction(w) / sum(map(Fraction, cuts.weights)) for w in cuts.weights]
    for p, g in np.ndindex(P, G):
        means = [sum(map(Fraction, r)) / len(r) for r in rewards[p, g].tolist()]
        mean = float(sum(map(Fraction.__mul__, share, means)))
        assert all_rewards[p, g] == pytest.approx(mean, rel=1e-14, abs=1e-16)
    A = cut_advantages(all_rewards, np.array(lengths), cuts)
    for advantages, expected in zip(A, tokens_one_by_one(cuts, rewards, lengths), strict=True):
        assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)


@property_settings(200)
@given(steps())
def test_each_token_of_thoughts_and_answers_has_the_advantage_of_its_cut(step):
    check(*step)


def test_the_places_of_all_rollouts_are_those_of_the_page():
    cuts = Cuts(2, (4, 8), (1.0, 1.0), 3)
    places = [cuts.place(s) for s in range(cuts.rollouts)]
    assert places == [None, None, *[(0, 4)] * 3, *[(0, 8)] * 3, *[(1, 4)] * 3, *[(1, 8)] * 3]
    assert [cuts.sample(g, j, k) for g, j, k in np.ndindex(2, 2, 3)] == list(range(2, 14))


ONE = (
    Cuts(2, (1, 3), (1.0, 1.0), 2),
    np.array([[[[0, 1], [1, 1]], [[0, 0], [1, 0]]]], float),
    [[3, 2] + [1] * 8],
)


def test_control_a_cut_that_is_one_token_off_is_found(monkeypatch):
    check(*ONE)
    monkeypatch.setattr(budget_relative, "_ends", lambda cuts, C: [min(b + 1, C) for b in cuts.budgets])
    with pytest.raises(AssertionError):
        check(*ONE)


def test_control_answers_that_count_for_the_next_part_are_found(monkeypatch):
    at_budgets = Cuts.at_budgets
    monkeypatch.setattr(Cuts, "at_budgets", lambda *arguments: np.roll(at_budgets(*arguments), 1, axis=2))
    with pytest.raises(AssertionError):
        check(*ONE)
