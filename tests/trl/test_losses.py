"""Our advantages, losses and gradients beside those of TRL 1.16's GRPOTrainer and RLOOTrainer, in fp64.

The numbers are drawn. Both sides evaluate one formula in different orders. A drawn log-probability is a
multiple of 2^-20 above -40. So fp64 holds every sum of a sequence's log-ratios exactly, and the order of this
sum decides nothing. Two kinds of rounding are left: at most 12 factors and exponentials a token (exp is
within an ulp, which is two roundings), and one addition for each token that is summed. `rounding_bound`
allows these for two sides.

Where TRL has another name or another formula:

- The upper bound of cispo is epsilon_high itself. Here it is 1 + clip_high.
- luspo is gspo with weight 1 / (P G) for each token: loss_agg_mode constant, times max_tokens.
- RLOO's loss is -mean_i min(R A, clip(R) A), where R is the ratio of the sequence. Ours counts the term of a
  sequence at each of its tokens. So with loss_agg_mode constant our gradient is TRL's divided by max_tokens,
  and our value of a sequence is TRL's divided by max_tokens and multiplied by the length of the sequence.
- TRL counts a sequence that it masks (mask_truncated_completions) in its means. zerokl trains on every
  sequence. So the mean over sequences is taken over the others, and scaled by their share.
- scale_rewards "batch" subtracts the mean of the group, and divides by the deviation of the step. Our `batch`
  (REINFORCE++) subtracts the mean of the step.
- importance_sampling_level "sequence" beside a correction of each token: TRL differentiates the sum of the
  terms of all tokens by each logp. Ours (GSPO-token) differentiates each term by the logp of its own token.
  They are equal if the correction is of the sequence, or if there is none.
- The KL in the loss is GRPO's (arXiv:2402.03300), as TRL computes it with use_bias_correction_kl = False.
  TRL's default multiplies each term by the ratio, and differentiates the ratio too (DeepSeek-V3.2,
  arXiv:2512.02556). This changes the gradient on-policy as well.
- A ratio that overflows beside an advantage of 0 is NaN in TRL, and 0 here.
- sapo, vespo, delta, off_policy_mask_threshold and top_entropy_quantile have no counterpart here.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.train.losses.advantage import advantages
from zerokl.engine.train.losses.policy_loss import policy_loss, sequence_weights
from zerokl.engine.train.losses.reward_shaping import completion_kl, shaped_rewards

from tests.helpers import assert_at_most_twice_the_error

# transformers warns about options that TRL sets.
pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]

# U: the unit roundoff of fp64.
MAX_TOKENS, G, U = 7, 4, 2.0**-53


@dataclasses.dataclass(frozen=True)
class Row:
    """A loss as TRL's options and as ours. `factor` is TRL's weight of a token over our weight."""

    trl: dict
    ours: dict
    factor: float = 1.0


def _corrected(mode: str, low: float | None, high: float) -> dict:
    return dict(
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )


_GRPO = dict(
    loss_type="grpo",
    epsilon_low=0.2,
    epsilon_high=0.2,
    importance_sampling_level="token",
    scale_rewards="group",
    use_vllm=False,
)
_GSPO = _GRPO | dict(importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
_DAPO = _GRPO | dict(loss_type="dapo", epsilon_high=0.28)
_CISPO = _GRPO | dict(loss_type="cispo", epsilon_high=5.0)
ROWS = {
    "grpo": Row(_GRPO, dict(preset="grpo")),
    "dr_grpo": Row(_GRPO | dict(loss_type="dr_grpo", scale_rewards="none"), dict(preset="dr_grpo")),
    "dapo": Row(_DAPO, dict(preset="dapo")),
    "bnpo": Row(_GRPO | dict(loss_type="bnpo"), dict(preset="grpo", loss_agg_mode="tokens")),
    "cispo": Row(_CISPO, dict(preset="cispo")),
    "gspo": Row(_GSPO, dict(preset="gspo")),
    "gspo, dapo's loss_agg_mode": Row(
        _GSPO | dict(loss_type="dapo"), dict(preset="gspo", loss_agg_mode="tokens")
    ),
    "gspo, dr_grpo's loss_agg_mode": Row(
        _GSPO | dict(loss_type="dr_grpo"), dict(preset="gspo", loss_agg_mode="constant")
    ),
    "luspo": Row(_GSPO | dict(loss_type="luspo"), dict(preset="gspo", loss_agg_mode="constant"), MAX_TOKENS),
    "tis": Row(_GRPO | _corrected("token_truncate", None, 2.0), dict(preset="tis")),
    "mis": Row(_GRPO | _corrected("sequence_mask", None, 2.0), dict(preset="mis")),
    "mis_token": Row(_GRPO | _corrected("token_mask", None, 2.0), dict(preset="mis_token")),
    "icepop": Row(_GRPO | _corrected("token_mask", 0.5, 5.0), dict(preset="icepop")),
    "tis of the sequence": Row(
        _GRPO | _corrected("sequence_truncate", None, 2.0), dict(preset="tis", correction_level="sequence")
    ),
    "cispo, tis": Row(
        _CISPO | _corrected("token_truncate", None, 2.0),
        dict(preset="cispo", correction="truncate", correction_high=2.0),
    ),
    "gspo, mis": Row(
        _GSPO | _corrected("sequence_mask", None, 2.0),
        dict(preset="gspo", correction="mask", correction_level="sequence", correction_high=2.0),
    ),
    "TRL's default": Row(
        _GRPO | dict(loss_type="dapo") | _corrected("sequence_mask", None, 3.0),
        dict(
            preset="dapo", clip_high=0.2, correction="mask", correction_level="sequence", correction_high=3.0
        ),
    ),
}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    from tests.trl.sides import make_trainers

    return make_trainers(tmp_path_factory.mktemp("trl"))


@pytest.fixture(autouse=True)
def _fp64():
    """Tensors that TRL makes of Python's numbers are fp64 too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn_step(seed: int):
    """A step of one or two prompts.

    Every fourth step has ratios from e^-40 to e^40; the others have ratios such as training has. Every third
    step masks some sequences.
    """
    from tests.trl.sides import Step

    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.choice([1, 2, 3, 6, MAX_TOKENS], G * int(rng.integers(1, 3)))]
    spread = 40.0 if seed % 4 == 3 else float(rng.choice([0.0, 1e-3, 0.3, 1.5]))

    def near(logprobs: list[float]) -> list[float]:
        return [_exact(x + rng.uniform(-spread, spread)) for x in logprobs]

    first = [[_exact(-x) for x in rng.exponential(2.0, n)] for n in lengths]
    masked = [bool(x) for x in rng.random(len(lengths)) < 0.3] if seed % 3 == 2 else [False] * len(lengths)
    masked[int(rng.integers(len(masked)))] = False
    rewards = (rng.integers(-8, 9, len(lengths)) / 8).tolist()
    return Step(rewards, *([near(x) for x in first] for _ in range(4)), masked)


def _exact(x: float) -> float:
    """x between -40 and 0, rounded down to a multiple of 2^-20."""
    return math.floor(min(max(x, -40.0), 0.0) * 2**20) / 2**20


def our_loss(step, A: torch.Tensor, row: Row, kl_coef: float):
    """The loss and the gradient of each kept token, their magnitudes, and the lengths of the sequences.

    A magnitude is the sum of the absolute terms of the loss, or of the gradient. Rounding is relative to it.
    """
    cfg = LossConfig(**row.ours, kl_coef=kl_coef)
    kept = [i for i, masked in enumerate(step.masked) if not masked]
    lengths = [step.lengths[i] for i in kept]
    repeats = torch.tensor(lengths)
    logp, old_logprobs, sampling_logprobs, ref_logprobs = (
        torch.tensor([x for i in kept for x in rows[i]])
        for rows in (step.logprobs, step.old_logprobs, step.sampling_logprobs, step.ref_logprobs)
    )
    logp.requires_grad_()
    share = row.factor * (1.0 if cfg.loss_agg_mode == "tokens" else len(kept) / len(step.masked))
    w = torch.tensor(sequence_weights(lengths, cfg.loss_agg_mode, MAX_TOKENS)).repeat_interleave(repeats)
    w = w * share
    A = A[kept].repeat_interleave(repeats)
    loss = policy_loss(logp, old_logprobs, sampling_logprobs, A, lengths, cfg, ref_logprobs) * w
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    no_kl = cfg.model_copy(update={"kl_coef": 0.0})
    policy = policy_loss(logp, old_logprobs, sampling_logprobs, A, lengths, no_kl, ref_logprobs) * w
    (policy_gradient,) = torch.autograd.grad(policy.sum(), logp)
    x = ref_logprobs - logp.detach()
    kl_terms = kl_coef * (torch.exp(x) + x.abs() + 1) * w
    size, gradient_size = policy.detach().abs() + kl_terms, policy_gradient.abs() + kl_terms
    return loss.detach(), gradient, size, gradient_size, lengths


def rounding_bound(magnitude: torch.Tensor, additions: int) -> torch.Tensor:
    """The largest difference that rounding can make between two evaluations."""
    return 2 * (12 + additions) * U * magnitude


def set_options(trainer, options: dict, kl_coef: float) -> None:
    """Set TRL's options, with two iterations a rollout.

    So TRL scores a rollout under the weights it was sampled from, as it does with vLLM.
    """
    fixed = dict(beta=kl_coef, num_iterations=2, max_completion_length=MAX_TOKENS)
    for name, value in (options | fixed).items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)


def trl_loss(trainer, step) -> tuple[torch.Tensor, float, torch.Tensor]:
    """TRL's advantages [P G], its loss, and the gradient of each kept token."""
    inputs = trainer.take(step)
    value, gradient = trainer.loss_and_gradient(inputs)
    rows = list(zip(gradient, step.masked, strict=True))
    assert not any(x for row, masked in rows if masked for x in row)
    return inputs["advantages"], value, torch.tensor([x for row, masked in rows if not masked for x in row])


def agree(trainer, step, row: Row, kl_coef: float) -> bool:
    """Whether TRL's loss and gradient are equal to ours, up to rounding."""
    set_options(trainer, row.trl, kl_coef)
    A, value, trl_gradient = trl_loss(trainer, step)
    loss, gradient, size, gradient_size, lengths = our_loss(step, A, row, kl_coef)
    assert math.isfinite(value)
    near = abs(loss.sum().item() - value) <= rounding_bound(size.sum(), len(loss)).item()
    allowed = rounding_bound(gradient_size, max(lengths))
    return near and bool(((trl_gradient - gradient).abs() <= allowed).all())


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient_are_trls(trainers, name, kl_coef):
    for seed in range(40):
        assert agree(trainers[0], drawn_step(seed), ROWS[name], kl_coef), seed


def wrong_choices(cfg: LossConfig) -> dict:
    """A wrong value for each choice of a resolved loss; some are only a little wrong."""
    wrong = {
        "loss_agg_mode": "tokens" if cfg.loss_agg_mode == "constant" else "constant",
        "clip_high": cfg.clip_high * 1.1,
        "importance_sampling_level": "geometric" if cfg.importance_sampling_level == "token" else "token",
        "correction": "full",
        "kl": "k2",
    }
    if cfg.bound == "clip":
        wrong["clip_low"] = cfg.clip_low * 1.1
    if cfg.correction != "none":
        wrong |= {"correction_high": cfg.correction_high * 1.1, "correction_level": "geometric"}
    return wrong


@pytest.mark.parametrize("name", ROWS)
def test_control_a_wrong_choice_is_found(trainers, name):
    row = ROWS[name]
    for choice, value in wrong_choices(LossConfig(**row.ours)).items():
        changed = dataclasses.replace(row, ours=row.ours | {choice: value})
        assert not all(agree(trainers[0], drawn_step(seed), changed, 0.04) for seed in range(40)), choice


@pytest.mark.parametrize("name", ROWS)
def test_in_fp32_the_error_is_at_most_twice_trls(trainers, name):
    """The error is that of the gradient, in 100 steps such as training has; fp64 is the judge.

    The gradient of a token is taken relative to the magnitude of its terms.
    """
    row, kl_coef, gradients = ROWS[name], 0.04, ([], [], [])
    set_options(trainers[0], row.trl, kl_coef)
    for seed in range(0, 400, 4):
        step = drawn_step(seed)
        torch.set_default_dtype(torch.float32)
        A, _, trl = trl_loss(trainers[0], step)
        ours = our_loss(step, A, row, kl_coef)[1]
        torch.set_default_dtype(torch.float64)
        _, exact, _, size, _ = our_loss(step, A.double(), row, kl_coef)
        for values, x in zip(gradients, (ours, trl, exact), strict=True):
            values.append(x.double() / size)
    ours, trl, exact = map(torch.cat, gradients)
    assert_at_most_twice_the_error(ours, trl, exact, name)


@pytest.mark.parametrize(("kind", "scale"), [("std", "group"), ("mean", "none")])
def test_advantages_are_trls(trainers, kind, scale):
    trainer = trainers[0]
    trainer.scale_rewards = scale
    for seed in range(200):
        step = drawn_step(seed)
        rewards = np.array(step.rewards).reshape(-1, G)
        expected = trainer.take(step)["advantages"].numpy().reshape(-1, G)
        deviation = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4 if kind == "std" else 1.0
        # Rewards are multiples of 1/8, so their sum is exact. The mean is off by a rounding of the largest
        # reward. The deviation has this error relative to itself. So the quotient is off by as much.
        allowed = rounding_bound(1.0, G) * np.abs(rewards).max() / deviation * (1 + np.abs(expected))
        assert (np.abs(advantages(rewards, kind) - expected) <= allowed).all(), seed


def rloo_equal(step, A: torch.Tensor, value: float, trl_gradient: torch.Tensor, row: Row) -> bool:
    """Whether TRL's RLOO loss and gradient are equal to ours, up to rounding."""
    loss, gradient, size, gradient_size, lengths = our_loss(step, A, row, kl_coef=0.0)
    repeated = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
    allowed = rounding_bound((size / repeated).sum(), len(loss)).item()
    near = abs((loss / repeated).sum().item() - value) <= allowed
    allowed = rounding_bound(gradient_size, max(lengths))
    return near and bool(((trl_gradient - gradient).abs() <= allowed).all())


def test_rloo_is_trls(trainers):
    """KL (k1, summed) in the reward, leave-one-out advantages, and PPO's clip of the sequence's ratio.

    TRL's KL is that of its trainer at the weights sampled from. Ours is that of the sampler. In the drawn
    step the sampler has the trainer's log-probabilities.
    """
    trainer = trainers[1]
    trainer.beta, trainer.epsilon_low, trainer.epsilon_high = 0.05, 0.2, 0.2
    row = Row(
        {},
        dict(preset="rloo", importance_sampling_level="sequence", bound="clip", clip_low=0.2, clip_high=0.2),
        MAX_TOKENS,
    )
    reward_cfg = LossConfig(preset="rloo", kl_coef=0.05, kl="k1", kl_in="reward")
    wrong_row = dataclasses.replace(row, ours=row.ours | {"clip_high": 0.25})
    wrong_bounds = wrong_baselines = 0
    for seed in range(120):
        step = drawn_step(seed)
        # TRL leaves the KL of a masked sequence out of its reward.
        step.masked = [False] * len(step.masked)
        step.sampling_logprobs = step.old_logprobs
        A, value, trl_gradient = trl_loss(trainer, step)
        rewards = np.array(step.rewards).reshape(-1, G)
        rows = [np.array(x) for x in step.old_logprobs], [np.array(x) for x in step.ref_logprobs]
        kl = completion_kl(*rows, reward_cfg).reshape(rewards.shape)
        lengths = np.reshape(step.lengths, rewards.shape)
        shaped = shaped_rewards(rewards, lengths, reward_cfg, MAX_TOKENS, kl=kl)
        expected = A.numpy().reshape(-1, G)
        allowed = rounding_bound(1.0, G) * np.abs(shaped).max() * 2
        assert (np.abs(advantages(shaped, "leave_one_out") - expected) <= allowed).all(), seed
        assert rloo_equal(step, A, value, trl_gradient, row), seed
        wrong_baselines += not np.allclose(advantages(shaped, "mean"), expected)
        wrong_bounds += not rloo_equal(step, A, value, trl_gradient, wrong_row)
    assert min(wrong_baselines, wrong_bounds) > 0, "controls: another baseline and another bound are found"


def test_where_trl_has_no_number(trainers):
    """A ratio beyond fp64 and an advantage of 0 give infinity times 0 in TRL, and exactly 0 here."""
    step = drawn_step(0)
    step.rewards, step.masked = [0.5] * len(step.rewards), [False] * len(step.masked)
    n = len(step.logprobs[0])
    step.logprobs[0], step.old_logprobs[0] = [0.0] * n, [-800.0] * n
    set_options(trainers[0], _GRPO, 0.0)
    A, value, trl_gradient = trl_loss(trainers[0], step)
    assert math.isnan(value)
    assert math.isnan(trl_gradient[0])
    loss, gradient, *_ = our_loss(step, A, ROWS["grpo"], 0.0)
    assert not loss.any()
    assert not gradient.any()
