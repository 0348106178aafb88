"""The critic's rewards, targets, advantages and loss, by their equations."""

import math
from statistics import fmean, variance

import numpy as np
import pytest
import torch
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.train.losses.critic import (
    Critic,
    critic_metrics,
    critic_of,
    token_rewards,
    value_loss,
    whitened,
)

from tests.helpers import randn

DRAWN = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)


def _cfg(**choices: object) -> LossConfig:
    return LossConfig(preset="ppo", **choices)


def test_a_completions_reward_is_at_its_last_token():
    assert token_rewards(np.array([0, 1, 1, 1], bool), (1,), None, 0.75).tolist() == [0, 0, 0.75]


def test_a_turns_reward_is_at_its_last_token_and_what_shaping_adds_at_the_last_of_all():
    assert token_rewards(DRAWN, (2, 6), [1.0, 0.5], 1.5).tolist() == [0, 1.0, 0, 0.5]
    assert token_rewards(DRAWN, (2, 6), [1.0, 0.5], 1.25).tolist() == [0, 1.0, 0, 0.25]


def test_with_gamma_and_lambda_1_the_target_is_the_rest_of_the_rewards():
    """Open-Reasoner-Zero's setting: A = R - v, so the target is R at each token, whatever v is."""
    values = [randn(0, 4).numpy(), randn(1, 2).numpy()]
    rewards = [np.array([0.0, 0.5, 0.0, 1.0]), np.array([0.0, 2.0])]
    critic = critic_of(rewards, values, _cfg(whiten=False))
    rest = [np.array([1.5, 1.5, 1.0, 1.0]), np.array([2.0, 2.0])]
    for target, A, v, R in zip(critic.targets, critic.advantages, values, rest, strict=True):
        assert target.dtype == np.float32
        np.testing.assert_allclose(target, R, rtol=1e-6)
        np.testing.assert_allclose(A, R - v, rtol=1e-6)


def test_a_smaller_lambda_takes_more_from_the_values():
    v, r = np.array([0.5, 0.25], np.float32), np.array([0.0, 1.0])
    one_step = critic_of([r], [v], _cfg(gamma=0.5, gae_lambda=0.0, whiten=False))
    assert one_step.advantages[0].tolist() == [0.5 * 0.25 - 0.5, 1.0 - 0.25]
    assert one_step.targets[0].tolist() == [0.125, 1.0]


def test_whitened_advantages_have_mean_0_and_variance_1_over_all_tokens():
    A = [np.array([1.0, 2.0, 4.0]), np.array([-1.0])]
    flat = np.concatenate(A).tolist()
    expected = [(a - fmean(flat)) / math.sqrt(variance(flat) + 1e-8) for a in flat]
    np.testing.assert_allclose(np.concatenate(whitened(A)), expected, rtol=1e-15)
    assert [len(a) for a in whitened(A)] == [3, 1]
    assert not np.concatenate(whitened([np.full(3, 0.1), np.full(1, 0.1)])).any()


def test_targets_are_those_before_advantages_are_whitened():
    rewards, values = [np.array([0.0, 1.0])], [np.array([0.5, 0.25], np.float32)]
    plain, white = (critic_of(rewards, values, _cfg(whiten=whiten)) for whiten in (False, True))
    assert plain.targets[0].tolist() == white.targets[0].tolist()
    assert plain.advantages[0].tolist() != white.advantages[0].tolist()


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_the_loss_and_its_gradient_are_autograds(clip):
    cfg, old, targets = _cfg(value_coef=0.5, value_clip=clip), randn(0, 200), randn(1, 200)
    v = (old + randn(2, 200, scale=0.3)).requires_grad_()
    loss = value_loss(v, old, targets, cfg)
    loss.backward(dy := randn(3, 200))
    x = v.detach().clone().requires_grad_()
    squares = [(x - targets) ** 2]
    if clip:
        squares.append((old + (x - old).clamp(-clip, clip) - targets) ** 2)
    plain = 0.25 * torch.stack(squares).max(0).values
    plain.backward(dy)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(v.grad, x.grad)
    stopped = int((v.grad == 0).sum())
    assert stopped == 0 if not clip else 0 < stopped < 100


def test_metrics_of_values():
    values, targets = [np.array([0.0, 1.0]), np.array([2.0])], [np.array([1.0, 1.0]), np.array([4.0])]
    metrics = critic_metrics(Critic(values, targets, []))
    errors = [1.0, 0.0, 2.0]
    assert metrics["critic/value_mean"] == 1.0
    assert metrics["critic/value_loss"] == pytest.approx(fmean(e * e for e in errors) / 2)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - variance(errors) / variance([1, 1, 4]))
    single = critic_metrics(Critic(values[1:], targets[1:], []))
    assert math.isnan(single["critic/explained_variance"])
