"""Generalised advantage estimation equals its double sum in rational numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from zerokl.engine.train.losses.gae import gae, turn_end_rewards

from tests.helpers import property_settings

NUMBER = st.floats(-4, 4, width=32)
# Reward, value, and whether the token was drawn.
TOKENS = st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), max_size=10)
TWO_TURNS = [
    (0.0, 0.25, False),
    (0.0, 0.5, True),
    (1.0, 0.75, True),
    (9.0, 9.0, False),
    (2.0, 1.0, True),
]
SHARE = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1, width=32))


def slow(tokens: list[tuple[float, float, bool]], c: int, gamma: float, lam: float) -> float:
    """Of drawn token c: sum_l (gamma lambda)^l (r + gamma V' - V)."""
    drawn = [(Fraction(r), Fraction(v)) for r, v, is_drawn in tokens if is_drawn]
    values = [v for _, v in drawn] + [Fraction(0)]
    g, decay = Fraction(gamma), Fraction(gamma) * Fraction(lam)
    total = Fraction(0)
    for k in range(c, len(drawn)):
        total += decay ** (k - c) * (drawn[k][0] + g * values[k + 1] - values[k])
    return float(total)


def columns(tokens: list[tuple[float, float, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rewards, values, drawn = (np.array([token[i] for token in tokens], float) for i in range(3))
    return rewards, values, drawn.astype(bool)


@property_settings(300)
@given(TOKENS, SHARE, SHARE)
@example(TWO_TURNS, 0.5, 1.0)
def test_the_recursion_equals_the_double_sum(tokens, gamma, lam):
    rewards, values, drawn = columns(tokens)
    A = gae(rewards, values, drawn, gamma, lam)
    assert A.dtype == np.float64
    assert not A[~drawn].any()
    for c, t in enumerate(np.flatnonzero(drawn)):
        assert A[t] == pytest.approx(slow(tokens, c, gamma, lam), rel=1e-13, abs=1e-13)


@property_settings(100)
@given(TOKENS, SHARE, SHARE)
def test_what_nobody_drew_decides_no_bit(tokens, gamma, lam):
    rewards, values, drawn = columns(tokens)
    alone = gae(rewards[drawn], values[drawn], drawn[drawn], gamma, lam)
    rewards[~drawn] = values[~drawn] = np.nan
    assert (gae(rewards, values, drawn, gamma, lam)[drawn] == alone).all()


def test_both_ends_of_lambda_are_known_estimators():
    """lambda = 1 is the discounted return minus the value; lambda = 0 is one step."""
    rewards, values = np.array([0.0, 0.0, 1.0, 0.0, 2.0]), np.array([0.5, 0.25, 0.125, 1.0, 0.5])
    drawn = np.ones(5, bool)
    returns = np.array([sum(r * 0.5**i for i, r in enumerate(rewards[t:])) for t in range(5)])
    assert (gae(rewards, values, drawn, 0.5, 1.0) == returns - values).all()
    one_step = rewards + 0.5 * np.array([*values[1:], 0.0]) - values
    assert (gae(rewards, values, drawn, 0.5, 0.0) == one_step).all()


def test_a_turns_reward_is_at_its_last_drawn_token():
    """Two turns may follow each other without an id between them, and a turn may be one token."""
    drawn = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], bool)
    rewards = turn_end_rewards(drawn, (2, 6, 8, 10), [1.0, 2.0, 3.0, 4.0])
    assert rewards.tolist() == [0, 0, 0, 1.0, 0, 0, 0, 2.0, 3.0, 0, 4.0]
    assert turn_end_rewards(np.zeros(3, bool), (), []).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("starts", "rewards", "message"),
    [
        ((1, 3), [1.0], "1 rewards, and 2 turns"),
        ((0,), [1.0], "must be rising places of drawn tokens"),
        ((3, 1), [1.0, 2.0], "must be rising places of drawn tokens"),
        ((4,), [1.0], "must be rising places of drawn tokens, below 4"),
    ],
)
def test_turns_that_contradict_each_other_are_refused(starts, rewards, message):
    with pytest.raises(ValueError, match=message):
        turn_end_rewards(np.array([0, 1, 1, 1], bool), starts, rewards)


@pytest.mark.parametrize(
    ("shape", "gamma", "lam", "message"),
    [
        (3, 1.0, 1.0, r"rewards, values and drawn \(\(2,\), \(3,\) and \(2,\)\) must be \[T\]"),
        (2, 1.5, 1.0, r"gamma \(1\.5\) must lie in 0 to 1"),
        (2, 1.0, float("nan"), r"lam \(nan\) must lie in 0 to 1"),
    ],
)
def test_other_arguments_are_refused(shape, gamma, lam, message):
    with pytest.raises(ValueError, match=message):
        gae(np.zeros(2), np.zeros(shape), np.ones(2, bool), gamma, lam)
