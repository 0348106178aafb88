"""The policy-gradient loss: independent choices, and the named algorithms as rows of a table.

    loss = - sum_i sum_t  w_i  f(r_it) A_i          r_it = exp(logp_it - logp_it at sampling)

    bound       none  f A = r A
                clip  f A = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)            (PPO, arXiv:1707.06347)
    normaliser  constant  w = 1 / (P G max_tokens)      (Dr. GRPO: no length or difficulty bias)
                tokens    w = 1 / tokens of the step    (DAPO)
                length    w = 1 / (P G len_i)           (GRPO)

Shapes: P prompts, G samples, C completion tokens of a micro-batch; i runs over the P G sequences, t over the tokens of one.
All weights are known before the first forward, so a micro-batch needs no other.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

Advantage = Literal["mean", "std", "leave_one_out", "batch"]
Bound = Literal["none", "clip"]
Normaliser = Literal["constant", "tokens", "length"]

PRESETS: dict[str, dict[str, object]] = {
    # Plain importance-sampled policy gradient. On-policy and exact, r = 1 and this is REINFORCE with a group baseline.
    "pg": dict(advantage="mean", bound="none", clip_low=0.0, clip_high=0.0, normaliser="constant"),
    # Group-relative policy optimisation, DeepSeekMath, arXiv:2402.03300.
    "grpo": dict(advantage="std", bound="clip", clip_low=0.2, clip_high=0.2, normaliser="length"),
    # GRPO done right, arXiv:2503.20783.
    "dr_grpo": dict(advantage="mean", bound="clip", clip_low=0.2, clip_high=0.2, normaliser="constant"),
    # Leave-one-out REINFORCE, arXiv:2402.14740.
    "rloo": dict(advantage="leave_one_out", bound="none", clip_low=0.0, clip_high=0.0, normaliser="constant"),
    # Clip-higher and token-level normalisation, arXiv:2503.14476.
    "dapo": dict(advantage="std", bound="clip", clip_low=0.2, clip_high=0.28, normaliser="tokens"),
}


class LossConfig(BaseModel):
    """A preset, and choices that differ from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: Literal["pg", "grpo", "dr_grpo", "rloo", "dapo"] = "pg"
    """Row of the table that fills every choice left open below."""
    advantage: Advantage | None = None
    """mean, std, leave_one_out or batch (see advantage.py)."""
    bound: Bound | None = None
    """none or clip."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """The ratio counts no lower than 1 - clip_low (bound clip)."""
    clip_high: float | None = Field(None, ge=0)
    """The ratio counts no higher than 1 + clip_high (bound clip)."""
    normaliser: Normaliser | None = None
    """constant, tokens or length."""

    def resolve(self) -> "LossConfig":
        """The same with every choice filled in."""
        own = {k: v for k, v in self.model_dump().items() if v is not None}
        return LossConfig.model_validate(PRESETS[self.preset] | own)


def sequence_weights(lengths: Sequence[int], normaliser: Normaliser, max_tokens: int) -> list[float]:
    """w_i of each sequence of the step, in fp64. lengths [P G] in completion tokens."""
    if normaliser == "constant":
        return [1.0 / (len(lengths) * max_tokens)] * len(lengths)
    if normaliser == "tokens":
        return [1.0 / sum(lengths)] * len(lengths)
    return [1.0 / (len(lengths) * n) for n in lengths]


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, A: torch.Tensor, cfg: LossConfig) -> torch.Tensor:
    """Loss of each token before its weight. logp (with gradient), old_logp, A [C] fp32 -> [C] fp32. cfg is resolved."""
    ratio = torch.exp(logp - old_logp)
    if cfg.bound == "none":
        return -(ratio * A)
    clipped = torch.clamp(ratio, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    return -torch.minimum(ratio * A, clipped * A)
