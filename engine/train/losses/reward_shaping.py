"""What a loss adds to the rewards, before advantages are made of them.

    overlong  DAPO's soft punishment (arXiv:2503.14476, equation 13); L = max_tokens, B = overlong_share L:
              0 up to L - B,   (L - B - len) / B beyond
    length    Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3), in groups whose lengths differ:
              lambda = 1/2 - (len - shortest) / (longest - shortest)
              lambda for a solved sample, min(0, lambda) for another sample
    KL        - kl_coef times the sum over the completion of the estimator of KL(policy || reference)

Shapes: rewards [P, G] fp64; lengths [P, G] drawn tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...config.loss_section import LossConfig
from .policy_loss import kl_terms


def shaped_rewards(
    rewards: np.ndarray,
    lengths: np.ndarray,
    cfg: LossConfig,
    max_tokens: int,
    trained: np.ndarray | None = None,
    kl: np.ndarray | None = None,
) -> np.ndarray:
    """Rewards [P, G] with everything that a resolved `cfg` asks for.

    max_tokens: that a sample can have. trained: which samples are trained on, bool; all where it is None.
    kl: of each sample (completion_kl), where the run has a reference. lengths, trained and kl are [P, G].
    """
    shaped, trained = rewards.copy(), np.ones(rewards.shape, bool) if trained is None else trained
    if cfg.overlong_share:
        buffer = cfg.overlong_share * max_tokens
        shaped += np.minimum(0.0, (max_tokens - buffer - lengths) / buffer)
    if cfg.length_reward:
        shaped += cfg.length_reward * length_rewards(rewards, lengths, trained)
    if kl is not None and cfg.kl_in == "reward":
        shaped -= cfg.kl_coef * kl
    return shaped


def length_rewards(rewards: np.ndarray, lengths: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Kimi's length reward [P, G], from -1/2 to 1/2. A sample is solved when its reward is 1 or more.

    Samples that are not trained on count in no group.
    """
    low, high = np.where(trained, lengths, np.inf), np.where(trained, lengths, -np.inf)
    shortest, longest = low.min(axis=1, keepdims=True), high.max(axis=1, keepdims=True)
    scale = 0.5 - (lengths - shortest) / np.maximum(longest - shortest, 1)
    return np.where(longest <= shortest, 0.0, np.where(rewards >= 1.0, scale, np.minimum(0.0, scale)))


def completion_kl(
    logprobs: Sequence[np.ndarray], ref_logprobs: Sequence[np.ndarray], cfg: LossConfig
) -> np.ndarray:
    """The estimator of KL(policy || reference) of each completion [P G]: a correctly rounded sum."""
    pairs = zip(logprobs, ref_logprobs, strict=True)
    return np.array(
        [math.fsum(kl_terms(torch.from_numpy(a), torch.from_numpy(b), cfg.kl)[0].tolist()) for a, b in pairs]
    )
