"""Mismatch on demand: a sampler that differs from the trainer in one controlled way, so that a correction can
be tested.

    weights       w' = w + gain (round(w) - w), rounded once to the sampler's compute dtype
    delay         the weights are those of `delay` steps ago, and the rollouts do not say so
    logits        z' = z + logit_noise n, with standard normal numbers n of the run's keys:
                  (seed, step, prompt, generation, position, token)
    temperature   tokens are drawn, and their logprobs reported, at another temperature than the trainer's

A rollout carries the logprobs it was drawn with, as with any engine; the trainer's differ. All of it is
reproducible to the bit.
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
    """The sampler's weights for the trainer's [numel] fp32, in fp32."""
    if not cfg.round_weights:
        return master
    rounded = master.to(_ROUNDED[cfg.round_weights]).float()
    return rounded if cfg.gain == 1.0 else master + (rounded - master) * cfg.gain


class Delayed:
    """The weights of `delay` steps ago; the first ones as long as there are no older."""

    def __init__(self, delay: int):
        self._kept: deque[torch.Tensor] = deque(maxlen=delay + 1)

    def push(self, weights: torch.Tensor) -> torch.Tensor:
        """Newer weights [numel]; returns those to sample from."""
        self._kept.append(weights.clone())
        return self._kept[0]
