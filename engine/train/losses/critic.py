"""PPO's critic: values, targets and the advantages of GAE (Schulman et al., arXiv:1707.06347).

    A, target    from rewards and values by gae.py;  target = A + v, before A is whitened
    whitened     A' = (A - mean) / sqrt(var + 1e-8), mean and variance (n - 1) over the drawn tokens of a step
    loss         value_coef 1/2 (v - target)^2
    value_clip   e > 0: value_coef 1/2 max((v - target)^2, (clip(v, v_old - e, v_old + e) - target)^2)

The values are those of the weights that were sampled from: the trainer scores all rollouts before the first
update. v is the critic's value in the pass of an update; in the first update it is v_old, bit for bit. The
loss of a token counts with the weight w of the policy's loss (policy_loss.py).

The reward of a turn comes at its last drawn token. What the loss adds to a reward (reward_shaping.py) comes
at the last drawn token of the trajectory. A trajectory that was cut has no value after its end: it counts as
ended, as in Open-Reasoner-Zero (arXiv:2503.24290).

Shapes: n rollouts that are trained on, C drawn tokens of a rollout.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...config.loss_section import LossConfig
from .advantage import all_equal
from .gae import gae, turn_end_rewards
from .policy_loss import KnownLoss

# As in TRL and OpenRLHF: it keeps the division finite.
_EPS = 1e-8


class Critic(NamedTuple):
    """What the critic adds to a step, for each rollout that is trained on."""

    values: list[np.ndarray]  # [n][C] fp32, with the weights that were sampled from
    targets: list[np.ndarray]  # [n][C] fp32
    advantages: list[np.ndarray]  # [n][C] fp64


def token_rewards(
    drawn: np.ndarray, turn_starts: Sequence[int], turn_rewards: Sequence[float] | None, shaped: float
) -> np.ndarray:
    """The reward of each drawn token, [C] fp64.

    drawn, turn_starts: of a Rollout. turn_rewards: of its turns; None for a completion, whose reward is
    `shaped`. shaped: the reward of the whole trajectory after shaping.
    """
    if turn_rewards is None:
        rewards, rest = np.zeros(int(drawn.sum())), shaped
    else:
        rewards = turn_end_rewards(drawn, turn_starts, turn_rewards)[drawn]
        rest = shaped - math.fsum(turn_rewards)
    rewards[-1] += rest
    return rewards


def critic_of(rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], cfg: LossConfig) -> Critic:
    """Advantages and targets from rewards [n][C] and values [n][C] fp32. cfg: resolved."""
    pairs = zip(rewards, values, strict=True)
    A = [gae(r, v.astype(np.float64), np.ones(len(v), bool), cfg.gamma, cfg.gae_lambda) for r, v in pairs]
    targets = [(a + v).astype(np.float32) for a, v in zip(A, values, strict=True)]
    return Critic(list(values), targets, whitened(A) if cfg.whiten else A)


def whitened(A: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A' [n][C] from A [n][C]: see the file's equations. Sums are correctly rounded."""
    flat = np.concatenate(A).tolist()
    if all_equal(flat):
        return [np.zeros(len(a)) for a in A]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
    return [(a - mean) / math.sqrt(variance + _EPS) for a in A]


def value_loss(
    v: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, cfg: LossConfig
) -> torch.Tensor:
    """The critic's loss of each token, before its weight w. -> [C] fp32.

    v (with gradient), old_values, targets: [C] fp32. cfg: resolved. Where both squares of a clipped loss are
    equal, the gradient is that of the first.
    """
    now = v.detach()
    error = now - targets
    value, slope = error * error, error
    if cfg.value_clip:
        clipped = torch.clamp(now, old_values - cfg.value_clip, old_values + cfg.value_clip) - targets
        square = clipped * clipped
        # Where a value was clipped, its loss is constant. Where it was not, both squares are equal.
        slope = torch.where(square > value, 0.0, slope)
        value = torch.maximum(value, square)
    return KnownLoss.apply(v, value * (cfg.value_coef * 0.5), slope * cfg.value_coef)


def critic_metrics(critic: Critic) -> dict[str, float]:
    """How good the values of a step are, over its drawn tokens.

    The explained variance is 1 - var(target - v) / var(target); NaN where all targets are equal.
    """
    v, targets = (np.concatenate(x).astype(np.float64).tolist() for x in (critic.values, critic.targets))
    errors = [target - value for target, value in zip(targets, v, strict=True)]
    target_variance = _variance(targets)
    return {
        "critic/value_mean": math.fsum(v) / len(v),
        "critic/value_loss": math.fsum(e * e for e in errors) / (2 * len(errors)),
        "critic/explained_variance": 1.0 - _variance(errors) / target_variance
        if target_variance
        else math.nan,
    }


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / len(values)
