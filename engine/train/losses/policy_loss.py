"""The policy-gradient loss: independent choices. The named algorithms are rows of a table (presets.py).

    loss = sum_i sum_t  w_i ( - c_it f(r_it) A_it  +  square term  +  kl_coef k_it )

There are two separate ratios. mu is the sampler, old the trainer at the weights that were sampled from, and
pi the trainer now:

    r   = pi / old   staleness, at the level importance_sampling_level. f is its bound (surrogates.py)
    rho = old / mu   mismatch, at the level correction_level. c is its correction (corrections.py)

c is a constant: no gradient goes through it. A is of the token; most advantages (advantage.py) are equal
for all tokens of a sequence.

    level          token      the token's own ratio
                   sequence   the product over the sequence, for each of its tokens
                   geometric  the geometric mean over the sequence (GSPO), for each of its tokens
                   (sequence and geometric: the gradient goes through the token's own logp, as in GSPO-token,
                   arXiv:2507.18071)
    cut tokens     a sampler that differs may draw a token that the trainer's top-k, top-p or min-p cuts. Its
                   old is 0, and after an update its pi need not be. It has no r: log r counts as 0 in every
                   update. (rho is 0 there.) The square term leaves out what pi cuts, too: no gradient goes
                   through it.
    loss_agg_mode  constant   w = 1 / (P G max_tokens)      (Dr. GRPO: no length or difficulty bias)
                   tokens     w = 1 / tokens of the step    (DAPO)
                   length     w = 1 / (P G len_i)           (GRPO)
                   pairs      w = 1 / P                     (DPO, G = 2; dpo.py)
    square         square / 2 (sum_t log r_it)^2 of each sequence           (Kimi k1.5, arXiv:2501.12599)
    kl             with x = log ref - log pi:  k1 = -x,  k2 = x^2 / 2,  k3 = exp(x) - x - 1
                   (Schulman, "Approximating KL divergence")

All weights w are known before the first forward. A micro-batch holds whole sequences, so it needs no other
micro-batch.

Shapes: P prompts, G generations, C completion tokens of a micro-batch; i runs over the P G sequences, t over
the tokens of one sequence.
"""

from collections.abc import Callable, Sequence

import torch

from ...config.loss_section import Estimator, Level, LossAggMode, LossConfig
from ...tasks.guard import guarded
from ...tasks.users_code import importable, load_object
from .corrections import CORRECTIONS
from .surrogates import SURROGATES, Surrogate, with_detached


def sequence_weights(
    lengths: Sequence[int], loss_agg_mode: LossAggMode, max_tokens: int, sequences: int = 0
) -> list[float]:
    """w_i of each sequence that is trained on, in fp64. lengths: their drawn tokens.

    sequences: all of the step, P G, where others are not trained on.
    """
    sequences = sequences or len(lengths)
    if loss_agg_mode == "constant":
        return [1.0 / (sequences * max_tokens)] * len(lengths)
    if loss_agg_mode == "tokens":
        return [1.0 / sum(lengths)] * len(lengths)
    if loss_agg_mode == "pairs":
        return [2.0 / sequences] * len(lengths)
    return [1.0 / (sequences * n) for n in lengths]


class KnownLoss(torch.autograd.Function):
    """A loss of x whose value and slope (its derivative) are known: `value` forward, `slope` backward."""

    @staticmethod
    def forward(ctx, x, value, slope):
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx, dy):
        (slope,) = ctx.saved_tensors
        return dy * slope, None, None


def policy_loss(
    logp: torch.Tensor,
    old_logprobs: torch.Tensor,
    sampling_logprobs: torch.Tensor,
    A: torch.Tensor,
    lengths: Sequence[int],
    cfg: LossConfig,
    ref_logprobs: torch.Tensor | None = None,
    directory: str = "",
) -> torch.Tensor:
    """The loss of each token, before its weight w. -> [C] fp32.

    logp (with gradient), old_logprobs, sampling_logprobs, A, ref_logprobs: [C] fp32. lengths: tokens of each
    sequence, C in all. cfg: resolved. directory: where a surrogate of the user's is looked up. Raises
    ValueError for a surrogate of the user's that returns another shape or dtype.
    """
    now = logp.detach()
    log_r = torch.where(torch.isneginf(old_logprobs), 0.0, now - old_logprobs)
    r = _ratio(log_r, lengths, cfg.importance_sampling_level)
    value, slope = surrogate(cfg, directory)(r, A, now, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high, r)
    rho = _ratio(_difference(old_logprobs, sampling_logprobs), lengths, cfg.correction_level)
    c = CORRECTIONS[cfg.correction](rho, cfg.correction_low, cfg.correction_high)
    value, slope = (-torch.where((x == 0) | (c == 0) | (A == 0), 0.0, x * c) for x in (value, slope))
    if cfg.square:
        sums, to_tokens = _sequence_sums(torch.where(torch.isneginf(log_r), 0.0, log_r), lengths)
        value = value + to_tokens(sums * sums * (cfg.square / 2.0) / sums.new_tensor(lengths))
        slope = slope + to_tokens(sums) * cfg.square
    if ref_logprobs is not None and cfg.kl_in == "loss":
        k, dk = kl_terms(now, ref_logprobs, cfg.kl)
        value, slope = value + k * cfg.kl_coef, slope + dk * cfg.kl_coef
    return KnownLoss.apply(logp, value, slope)


def surrogate(cfg: LossConfig, directory: str = "") -> Surrogate:
    """The function that bounds the staleness ratio: the user's own, or the function of cfg.bound.

    directory: where the user's own is looked up, beside the current one.

    Raises ValueError where the user's function cannot be imported.
    """
    if not cfg.surrogate:
        return SURROGATES[cfg.bound]
    what = f"loss.surrogate: {cfg.surrogate}"
    user_surrogate = with_detached(guarded(what, load_object, cfg.surrogate, "loss.surrogate", directory))

    def checked(r, A, logp, low, high, r_detached):
        with importable(directory):
            pair = guarded(what, user_surrogate, r, A, logp, low, high, r_detached)
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, torch.Tensor) for x in pair)
        ):
            raise ValueError(f"{what} must return two tensors, (value, slope)")
        for name, x in zip(("value", "slope"), pair, strict=True):
            if x.shape != r.shape or x.dtype != r.dtype:
                raise ValueError(
                    f"{what} returned a {name} of {tuple(x.shape)} {x.dtype}; "
                    f"it must be {tuple(r.shape)} {r.dtype}, as the ratio"
                )
            if torch.isnan(x[A != 0]).any():
                raise ValueError(f"{what} returned a {name} that is NaN")
        return pair

    return checked


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, and 0 where both are -inf: equal probabilities."""
    return torch.where(a == b, 0.0, a - b)


def kl_terms(
    logp: torch.Tensor, ref_logprobs: torch.Tensor, kind: Estimator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimator k of KL(policy || reference) at each token, and its derivative by logp.

    logp, ref_logprobs [C] -> [C], [C].
    """
    x = ref_logprobs - logp
    if kind == "k1":
        return -x, torch.ones_like(x)
    if kind == "k2":
        return x * x * 0.5, -x
    e = torch.exp(x)
    return e - x - 1.0, 1.0 - e


def _ratio(log_ratio: torch.Tensor, lengths: Sequence[int], level: Level) -> torch.Tensor:
    """The ratio of each token at a level, [C]."""
    if level == "token":
        return torch.exp(log_ratio)
    sums, to_tokens = _sequence_sums(log_ratio, lengths)
    return to_tokens(torch.exp(sums if level == "sequence" else sums / sums.new_tensor(lengths)))


def _sequence_sums(
    x: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The sum of each sequence [n], and a function that hands a value of each sequence [n] to its tokens [C].

    A sum runs along the sequence in fp64, and is rounded once.
    """
    counts = torch.tensor(list(lengths), device=x.device)
    sums = torch.stack([part.sum() for part in x.double().split(list(lengths))]).to(x.dtype)
    return sums, lambda values: values.repeat_interleave(counts)
