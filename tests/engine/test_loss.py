"""Advantages and the loss table against a per-token Python implementation of the papers' formulas.

Papers: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, DAPO arXiv:2503.14476.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zerokl.engine.advantage import advantages
from zerokl.engine.loss import PRESETS, LossConfig, policy_loss, sequence_weights

MAX_TOKENS = 7
EPS = 1e-4  # in GRPO's denominator; TRL's value
# (low, high) of the clip of each algorithm that has one
CLIP = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}


def slow_advantage(name: str, rewards: list[float], g: int) -> float:
    """Advantage of sample g of a group."""
    exact = [Fraction(r) for r in rewards]
    if name == "rloo":
        others = exact[:g] + exact[g + 1 :]
        return float(exact[g] - sum(others) / len(others))
    centred = float(exact[g] - sum(exact) / len(exact))
    if name in ("pg", "dr_grpo"):
        return centred
    variance = sum((r - sum(exact) / len(exact)) ** 2 for r in exact) / (len(exact) - 1)
    return centred / (math.sqrt(variance) + EPS)


def slow_token(name: str, logp: float, old: float, A: float) -> tuple[float, float]:
    """Objective of one token, and its derivative with respect to logp."""
    ratio = math.exp(logp - old)
    if name not in CLIP:
        return ratio * A, ratio * A
    low, high = 1 - CLIP[name][0], 1 + CLIP[name][1]
    bounded = min(max(ratio, low), high)
    return min(ratio * A, bounded * A), ratio * A if ratio * A <= bounded * A else 0.0


def slow_weight(name: str, i: int, lengths: list[int]) -> float:
    """Share of a token of sequence i in the loss."""
    if name == "grpo":  # mean over a sequence, then over sequences
        return 1 / len(lengths) / lengths[i]
    if name == "dapo":  # mean over all tokens of the step
        return 1 / sum(lengths)
    return 1 / len(lengths) / MAX_TOKENS  # Dr. GRPO: a constant instead of the length


REWARD = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.1]), st.floats(-100, 100))


@st.composite
def groups(draw) -> list[list[float]]:
    """Rewards [P][G]."""
    P, G = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    return draw(st.lists(st.lists(REWARD, min_size=G, max_size=G), min_size=P, max_size=P))


@st.composite
def steps(draw) -> tuple[list[list[float]], list[list[tuple[float, float]]]]:
    """Rewards [P][G], and (logp, sampler's logp) of each token of each sequence.

    Ratios reach from 0 to e^37: nothing less likely than 2^-53 is ever drawn, as the uniform numbers have 53 bits.
    """
    rewards = draw(groups())
    logp = st.one_of(st.just(-1.0), st.floats(-1.5, -0.5), st.floats(-800, 0))
    old = st.one_of(st.just(-1.0), st.floats(-1.5, -0.5), st.floats(-37, 0))
    n = len(rewards) * len(rewards[0])
    return rewards, draw(st.lists(st.lists(st.tuples(logp, old), min_size=1, max_size=MAX_TOKENS), min_size=n, max_size=n))


@pytest.mark.parametrize("name", PRESETS)
@settings(deadline=None, max_examples=60)
@given(groups())
def test_advantages_equal_the_formula(name, rewards):
    A = advantages(np.array(rewards), PRESETS[name]["advantage"])
    for p, group in enumerate(rewards):
        for g in range(len(group)):
            expected = slow_advantage(name, group, g)
            # Mean and difference are off by an ulp of the largest reward, the deviation by as much; then they are divided.
            scale = max(map(abs, group)) / ((np.std(group, ddof=1) + EPS) if name in ("grpo", "dapo") else 1.0)
            assert A[p, g] == pytest.approx(expected, rel=1e-13, abs=1e-14 * scale * (1 + abs(expected)))


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out", "batch"])
@given(value=st.floats(-100, 100), P=st.integers(1, 4), G=st.integers(2, 9))
def test_a_step_of_equal_rewards_has_advantage_exactly_zero(kind, value, P, G):
    assert not advantages(np.full((P, G), value), kind).any()


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out"])
@given(value=st.floats(-100, 100), others=st.lists(REWARD, min_size=3, max_size=3))
def test_an_all_equal_group_has_advantage_exactly_zero_whatever_is_beside_it(kind, value, others):
    assert not advantages(np.array([others, [value] * 3]), kind)[1].any()


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out", "batch"])
@given(rewards=st.lists(REWARD, min_size=5, max_size=5), order=st.permutations(range(5)))
def test_the_order_of_the_samples_does_not_change_a_bit(kind, rewards, order):
    A = advantages(np.array([rewards]), kind)
    assert (advantages(np.array([[rewards[i] for i in order]]), kind) == A[:, list(order)]).all()


@given(rewards=groups())
def test_whitening_takes_mean_and_deviation_over_the_whole_step(rewards):
    r = np.array(rewards)
    scale = np.abs(r).max() / (r.std(ddof=1) + EPS)
    np.testing.assert_allclose(
        advantages(r, "batch"), (r - r.mean()) / (r.std(ddof=1) + EPS), rtol=1e-12, atol=1e-13 * scale * (1 + r.size)
    )


@pytest.mark.parametrize("name", PRESETS)
@settings(deadline=None, max_examples=100)
@given(steps())
def test_loss_and_gradient_equal_the_formula(name, step):
    rewards, sequences = step
    cfg, G = LossConfig(preset=name).resolve(), len(rewards[0])
    lengths = [len(s) for s in sequences]
    weights = sequence_weights(lengths, cfg.normaliser, MAX_TOKENS)
    A = [slow_advantage(name, rewards[i // G], i % G) for i in range(len(sequences))]
    for i, sequence in enumerate(sequences):
        logp, old = torch.tensor(sequence, dtype=torch.float64).T
        logp.requires_grad_()
        loss = weights[i] * policy_loss(logp, old, torch.full_like(old, A[i]), cfg)
        loss.sum().backward()
        for t, (new, before) in enumerate(sequence):
            objective, slope = slow_token(name, new, before, A[i])
            w = slow_weight(name, i, lengths)
            assert loss[t].item() == pytest.approx(-w * objective, rel=1e-12, abs=1e-300)
            if min(abs(math.exp(new - before) - 1 - edge) for edge in (-0.2, 0.2, 0.28)) > 1e-12:  # no derivative at the bound itself
                assert logp.grad[t].item() == pytest.approx(-w * slope, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_algorithm_has_the_plain_policy_gradient(name):
    logp = torch.tensor([-0.3, -2.0, -37.0], requires_grad=True)
    A = torch.tensor([0.5, -0.25, 2.0])
    loss = policy_loss(logp, logp.detach().clone(), A, LossConfig(preset=name).resolve())
    loss.sum().backward()
    assert torch.equal(loss, -A)
    assert torch.equal(logp.grad, -A)


def test_a_choice_overrides_its_preset():
    cfg = LossConfig(preset="dapo", clip_high=0.5).resolve()
    assert (cfg.clip_low, cfg.clip_high, cfg.normaliser) == (0.2, 0.5, "tokens")
    assert cfg.resolve() == cfg
