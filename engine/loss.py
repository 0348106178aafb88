"""The policy-gradient loss: independent choices, and the named algorithms as rows of a table.

    loss = sum_i sum_t  w_i ( - c_it f(r_it) A_i  +  square term  +  kl_coef k_it )

Two ratios are kept apart. With mu the sampler, old the trainer at the weights that were sampled from, and pi the trainer now:

    r  = pi / old   staleness. `ratio` says over what; `bound` how far it counts
    c  = old / mu   mismatch. `correction_level` says over what; `correction` how it counts. A constant: no gradient goes through it

    level       token      the token's own ratio
                sequence   the product over the sequence, for each of its tokens
                geometric  the geometric mean over the sequence (GSPO), for each of its tokens
                (sequence and geometric: the gradient goes through the token's own logp, as in GSPO-token, arXiv:2507.18071)
    bound       none         f A = r A
                clip         f A = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      (PPO, arXiv:1707.06347)
                truncate     f A = min(r, 1 + clip_high) A
                mask         f A = r A where 1 - clip_low <= r <= 1 + clip_high, else 0
                clip_weight  f A = sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp       (CISPO, arXiv:2506.13585)
    correction  none         c = 1: the mismatch is ignored
                full         c = ratio                                                   (importance sampling)
                truncate     c = min(ratio, correction_high)                             (TIS)
                mask         c = ratio where correction_low <= ratio <= correction_high, else 0   (MIS, IcePop)
    normaliser  constant  w = 1 / (P G max_tokens)      (Dr. GRPO: no length or difficulty bias)
                tokens    w = 1 / tokens of the step    (DAPO)
                length    w = 1 / (P G len_i)           (GRPO)
    square      square / 2 (sum_t log r_it)^2 of each sequence                           (Kimi k1.5, arXiv:2501.12599)
    kl          with x = log ref - log pi:  k1 = -x,  k2 = x^2 / 2,  k3 = exp(x) - x - 1 (Schulman, "Approximating KL divergence")

Shapes: P prompts, G samples, C completion tokens of a micro-batch; i runs over the P G sequences, t over the tokens of one.
All weights are known before the first forward, and a micro-batch holds whole sequences, so it needs no other.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .loss_table import PRESETS

Advantage = Literal["mean", "std", "leave_one_out", "batch"]
Level = Literal["token", "sequence", "geometric"]
Bound = Literal["none", "clip", "truncate", "mask", "clip_weight"]
Correction = Literal["none", "full", "truncate", "mask"]
Normaliser = Literal["constant", "tokens", "length"]
Estimator = Literal["k1", "k2", "k3"]


class LossConfig(BaseModel):
    """A preset, and choices that differ from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: Literal[tuple(PRESETS)] = "pg"  # type: ignore[valid-type]
    """Row of the table that fills every choice left open below."""
    advantage: Advantage | None = None
    """mean, std, leave_one_out or batch (see advantage.py)."""
    ratio: Level | None = None
    """Level of the staleness ratio: token, sequence or geometric."""
    bound: Bound | None = None
    """none, clip, truncate, mask or clip_weight."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """The staleness ratio counts no lower than 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0)
    """The staleness ratio counts no higher than 1 + clip_high."""
    correction: Correction | None = None
    """What is done about the mismatch ratio: none, full, truncate or mask."""
    correction_level: Level | None = None
    """Level of the mismatch ratio: token, sequence or geometric."""
    correction_low: float | None = Field(None, ge=0)
    """A mismatch ratio below this is masked (correction mask)."""
    correction_high: float | None = Field(None, gt=0)
    """A mismatch ratio above this is truncated or masked."""
    normaliser: Normaliser | None = None
    """constant, tokens or length."""
    square: float | None = Field(None, ge=0)
    """Weight of the squared log-ratio of a sequence."""
    length_reward: float | None = Field(None, ge=0)
    """Weight of the length reward within a group (shaping.py); 0 is off."""
    overlong_share: float | None = Field(None, ge=0, le=1)
    """Last share of sampling.max_tokens in which a completion's length is penalised (shaping.py); 0 is off."""
    draws: int | None = Field(None, ge=1)
    """Dynamic sampling: draw prompts up to this many times, until enough groups differ in their rewards; 1 is off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference; 0 is off."""
    kl: Estimator = "k3"
    """Estimator of the KL divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it counts: in each token's loss, with gradient, or summed over the completion and taken off its reward."""
    reference: str = ""
    """Model folder or hub name of the frozen reference; empty is the run's first model. The ledger chains its weights, not the place."""

    @model_validator(mode="after")
    def _check(self) -> "LossConfig":
        if self.correction_low is not None and self.correction_high is not None and self.correction_low > self.correction_high:
            raise ValueError(f"correction_low ({self.correction_low}) must not exceed correction_high ({self.correction_high})")
        return self

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


class _Known(torch.autograd.Function):
    """A loss whose value and slope in logp are known: `value` forward, `slope` backward. No 0 * inf, however extreme a ratio."""

    @staticmethod
    def forward(ctx, logp, value, slope):
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx, dy):
        (slope,) = ctx.saved_tensors
        return dy * slope, None, None


def policy_loss(
    logp: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor,
    A: torch.Tensor,
    lengths: Sequence[int],
    cfg: LossConfig,
    reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each token before its weight w. cfg is resolved.

    logp (with gradient), old, sampler, A, reference [C] fp32; lengths: tokens of each sequence, summing to C. -> [C] fp32.
    """
    now = logp.detach()
    log_r = _difference(now, old)
    value, slope = _bounded(_ratio(log_r, lengths, cfg.ratio), A, now, cfg)
    c = _corrected(_ratio(_difference(old, sampler), lengths, cfg.correction_level), cfg)
    value, slope = (-torch.where((x == 0) | (c == 0) | (A == 0), torch.zeros_like(x), x * c) for x in (value, slope))
    if cfg.square:
        sums, each = _sequence_sums(log_r, lengths)
        value = value + each(sums * sums * (cfg.square / 2.0) / sums.new_tensor(lengths))
        slope = slope + each(sums) * cfg.square
    if reference is not None and cfg.kl_in == "loss":
        k, dk = kl_terms(now, reference, cfg.kl)
        value, slope = value + k * cfg.kl_coef, slope + dk * cfg.kl_coef
    return _Known.apply(logp, value, slope)


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, and 0 where both are -inf: equal probabilities."""
    return torch.where(a == b, torch.zeros_like(a), a - b)


def kl_terms(logp: torch.Tensor, reference: torch.Tensor, kind: Estimator) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimator k of KL(policy || reference) at each token, and its derivative by logp. logp, reference [C] -> [C], [C]."""
    x = reference - logp
    if kind == "k1":
        return -x, torch.ones_like(x)
    if kind == "k2":
        return x * x * 0.5, -x
    e = torch.exp(x)
    return e - x - 1.0, 1.0 - e


def _bounded(r: torch.Tensor, A: torch.Tensor, logp: torch.Tensor, cfg: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """f A and its derivative by logp, [C] each. Where A is 0 they may be anything."""
    low, high = 1.0 - cfg.clip_low, 1.0 + cfg.clip_high
    rA, zero = r * A, torch.zeros_like(r)
    if cfg.bound == "none":
        return rA, rA
    if cfg.bound == "clip":
        clipped = torch.clamp(r, low, high) * A
        return torch.minimum(rA, clipped), torch.where(rA <= clipped, rA, zero)
    if cfg.bound == "truncate":
        return torch.clamp(r, max=high) * A, torch.where(r <= high, rA, zero)
    if cfg.bound == "mask":
        kept = torch.where((r >= low) & (r <= high), rA, zero)
        return kept, kept
    weight = torch.clamp(r, low, high) * A
    return torch.where(weight == 0, zero, weight * logp), weight


def _corrected(ratio: torch.Tensor, cfg: LossConfig) -> torch.Tensor:
    """c of each token, [C]."""
    if cfg.correction == "none":
        return torch.ones_like(ratio)
    if cfg.correction == "full":
        return ratio
    if cfg.correction == "truncate":
        return torch.clamp(ratio, max=cfg.correction_high)
    return torch.where((ratio >= cfg.correction_low) & (ratio <= cfg.correction_high), ratio, torch.zeros_like(ratio))


def _ratio(log_ratio: torch.Tensor, lengths: Sequence[int], level: Level) -> torch.Tensor:
    """The ratio that counts for each token, [C]."""
    if level == "token":
        return torch.exp(log_ratio)
    sums, each = _sequence_sums(log_ratio, lengths)
    return each(torch.exp(sums if level == "sequence" else sums / sums.new_tensor(lengths)))


def _sequence_sums(x: torch.Tensor, lengths: Sequence[int]):
    """The sum of each sequence [n], in fp64 along the sequence and rounded once; and how to hand a value [n] to its tokens [C]."""
    counts = torch.tensor(list(lengths), device=x.device)
    sums = torch.stack([part.sum() for part in x.double().split(list(lengths))]).to(x.dtype)
    return sums, lambda values: values.repeat_interleave(counts)
