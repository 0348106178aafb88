"""Mismatch on demand: a sampler that differs from the trainer in one controlled way, so that a correction can be tested.

    weights   w' = w + gain (round(w) - w), rounded once to the sampler's compute dtype
    delay     the weights are those of `delay` steps ago, and the rollouts do not say so
    logits    z' = z + logit_noise n, n standard normal numbers of the run's keys: (seed, step, prompt, sample, position, token)
    temperature   tokens are drawn, and their logprobs reported, at another temperature than the trainer's

The logprobs a rollout carries are those it was drawn with, as with any engine; the trainer's differ. All of it is reproducible to the bit.
"""

from collections import deque
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

_ROUNDED = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip


class MismatchConfig(BaseModel):
    """How the native sampler differs from the trainer. Anything here needs exact = false."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    logit_noise: float = Field(0.0, ge=0)
    """Standard deviation of what is added to each logit, after the temperature."""
    round_weights: Literal["", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"] = ""
    """The sampler's weights are rounded to this dtype."""
    gain: float = Field(1.0, ge=0)
    """Factor on the difference that round_weights makes."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of the sampler; 0 is the trainer's."""
    delay: int = Field(0, ge=0)
    """Steps by which the sampler's weights are late, though it says they are not."""

    @property
    def any(self) -> bool:
        """Whether the sampler differs in any of these."""
        return bool(self.logit_noise or self.round_weights or self.temperature or self.delay)

    def weights(self, master: torch.Tensor) -> torch.Tensor:
        """The sampler's weights for the trainer's [numel] fp32, in fp32."""
        if not self.round_weights:
            return master
        rounded = master.to(_ROUNDED[self.round_weights]).float()
        return rounded if self.gain == 1.0 else master + (rounded - master) * self.gain


class Delayed:
    """The weights of `delay` steps ago; the first ones as long as there are no older."""

    def __init__(self, delay: int):
        self._kept: deque[torch.Tensor] = deque(maxlen=delay + 1)

    def push(self, weights: torch.Tensor) -> torch.Tensor:
        """Newer weights [numel]; returns those to sample from."""
        self._kept.append(weights.clone())
        return self._kept[0]
