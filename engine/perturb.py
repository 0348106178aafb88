"""Mismatch on demand: a sampler that differs from the trainer in controlled ways, for tests of corrections.

    weights       w' = w + gain (round(w) - w), rounded once to the sampler's compute dtype
    delay         the weights are those of `delay` steps ago, but the rollouts name the current version
    logits        z' = z + logit_noise n, with standard normal numbers n from the run's keys:
                  (seed, step, prompt, generation, position, token)
    temperature   tokens are drawn, and their logprobs are reported, at a temperature of the sampler's own

As with any engine, a rollout carries the logprobs with which its tokens were drawn. The trainer's logprobs
differ from them. Everything is reproducible to the bit.
"""

from collections import deque

import torch

from .config import PerturbConfig

_ROUNDED = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def perturbed_weights(cfg: PerturbConfig, master: torch.Tensor) -> torch.Tensor:
    """The sampler's weights, [numel] fp32, from the trainer's master weights [numel] fp32."""
    if not cfg.round_weights:
        return master
    rounded = master.to(_ROUNDED[cfg.round_weights]).float()
    return rounded if cfg.gain == 1.0 else master + (rounded - master) * cfg.gain


class Delayed:
    """The weights of `delay` steps ago, or the first weights where there are none so old."""

    def __init__(self, delay: int):
        self._kept: deque[torch.Tensor] = deque(maxlen=delay + 1)

    def push(self, weights: torch.Tensor) -> torch.Tensor:
        """Add the newest weights [numel]. Returns the weights to sample from."""
        self._kept.append(weights.clone())
        return self._kept[0]
