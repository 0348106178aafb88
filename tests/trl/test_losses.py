"""Advantages, losses and their gradients beside TRL 1.16's own GRPOTrainer and RLOOTrainer, on drawn numbers
and in fp64.

Both sides evaluate one formula in other orders. A drawn log-probability is a multiple of 2^-20 above -40, so
that fp64 holds every sum of a sequence's log-ratios exactly and the order of that sum decides nothing. What
is left is rounding: of no more than 12 factors and exponentials a token (exp is within an ulp: two
roundings), and of one addition for each token that is summed. `bound` is that for two sides.

What TRL calls otherwise, and what is not the same:

- the upper bound of cispo is epsilon_high itself, here 1 + clip_high;
- luspo is gspo with weight 1 / (P G) for each token: loss_agg_mode constant, times max_tokens;
- RLOO's loss is -mean_i min(R A, clip(R) A) with R the ratio of the sequence. Ours counts a sequence's term at each of its tokens, so
  with loss_agg_mode constant the gradient is TRL's over max_tokens, and the value besides times the
  sequence's length;
- a sequence that TRL masks (mask_truncated_completions) is counted in its means. zerokl trains on every sequence, so the mean over
  sequences is taken over the others and scaled by their share;
- scale_rewards "batch" subtracts the group's mean and divides by the step's deviation; our `batch` (REINFORCE++) subtracts the step's mean;
- importance_sampling_level "sequence" beside a correction of each token: TRL differentiates the sum of all tokens' terms through each logp,
  ours (GSPO-token) each term through its own. They are equal where the correction is that of the sequence, or
  none;
- the KL in the loss is GRPO's (arXiv:2402.03300), as TRL computes it with use_bias_correction_kl = False. Its default multiplies each term
  by the ratio and differentiates that, too (DeepSeek-V3.2, arXiv:2512.02556), which changes the gradient
  on-policy as well;
- a ratio that overflows beside an advantage of 0 is NaN in TRL, and 0 here;
- sapo, vespo, delta, off_policy_mask_threshold and top_entropy_quantile have no counterpart here.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from zerokl.engine.loss.advantage import advantages
from zerokl.engine.loss.config import LossConfig
from zerokl.engine.loss.policy_loss import policy_loss, sequence_weights
from zerokl.engine.loss.reward_shaping import shaped_rewards

from tests.helpers import assert_at_most_twice_the_error

# transformers warns of options that TRL sets.
pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]

MAX_TOKENS, G, U = 7, 4, 2.0**-53


@dataclasses.dataclass(frozen=True)
class Row:
    """A loss: TRL's options, and the same as ours. `factor`: TRL's weight of a token over ours."""

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


_OWN = dict(
    loss_type="grpo",
    epsilon_low=0.2,
    epsilon_high=0.2,
    importance_sampling_level="token",
    scale_rewards="group",
    use_vllm=False,
)
_GSPO = _OWN | dict(importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
_DAPO, _CISPO = (
    _OWN | dict(loss_type="dapo", epsilon_high=0.28),
    _OWN | dict(loss_type="cispo", epsilon_high=5.0),
)
ROWS = {
    "grpo": Row(_OWN, dict(preset="grpo")),
    "dr_grpo": Row(_OWN | dict(loss_type="dr_grpo", scale_rewards="none"), dict(preset="dr_grpo")),
    "dapo": Row(_DAPO, dict(preset="dapo")),
    "bnpo": Row(_OWN | dict(loss_type="bnpo"), dict(preset="grpo", loss_agg_mode="tokens")),
    "cispo": Row(_CISPO, dict(preset="cispo")),
    "gspo": Row(_GSPO, dict(preset="gspo")),
    "gspo, dapo's loss_agg_mode": Row(
        _GSPO | dict(loss_type="dapo"), dict(preset="gspo", loss_agg_mode="tokens")
    ),
    "gspo, dr_grpo's loss_agg_mode": Row(
        _GSPO | dict(loss_type="dr_grpo"), dict(preset="gspo", loss_agg_mode="constant")
    ),
    "luspo": Row(_GSPO | dict(loss_type="luspo"), dict(preset="gspo", loss_agg_mode="constant"), MAX_TOKENS),
    "tis": Row(_OWN | _corrected("token_truncate", None, 2.0), dict(preset="tis")),
    "mis": Row(_OWN | _corrected("sequence_mask", None, 2.0), dict(preset="mis")),
    "mis_token": Row(_OWN | _corrected("token_mask", None, 2.0), dict(preset="mis_token")),
    "icepop": Row(_OWN | _corrected("token_mask", 0.5, 5.0), dict(preset="icepop")),
    "tis of the sequence": Row(
        _OWN | _corrected("sequence_truncate", None, 2.0), dict(preset="tis", correction_level="sequence")
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
        _OWN | dict(loss_type="dapo") | _corrected("sequence_mask", None, 3.0),
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
    """What TRL makes of Python's numbers is fp64, too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn_step(seed: int):
    """A step of one or two prompts.

    Every fourth has ratios from e^-40 to e^40, the others such as training has; every third masks some.
    """
    from tests.trl.sides import Step

    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.choice([1, 2, 3, 6, MAX_TOKENS], G * int(rng.integers(1, 3)))]
    spread = 40.0 if seed % 4 == 3 else float(rng.choice([0.0, 1e-3, 0.3, 1.5]))

    def near(start: list[float]) -> list[float]:
        return [_held(x + rng.uniform(-spread, spread)) for x in start]

    first = [[_held(-x) for x in rng.exponential(2.0, n)] for n in lengths]
    masked = [bool(x) for x in rng.random(len(lengths)) < 0.3] if seed % 3 == 2 else [False] * len(lengths)
    masked[int(rng.integers(len(masked)))] = False
    rewards = (rng.integers(-8, 9, len(lengths)) / 8).tolist()
    return Step(rewards, *([near(x) for x in first] for _ in range(4)), masked)


def _held(x: float) -> float:
    """The nearest multiple of 2^-20 in -40 to 0."""
    return math.floor(min(max(x, -40.0), 0.0) * 2**20) / 2**20


def ours(step, A: torch.Tensor, row: Row, kl_coef: float):
    """Loss and gradient of each kept token, and the magnitude of what was added up to each:

    what rounding is relative to.
    """
    cfg = LossConfig(**row.ours, kl_coef=kl_coef).resolve()
    kept = [i for i, masked in enumerate(step.masked) if not masked]
    lengths = [step.lengths[i] for i in kept]
    each = torch.tensor(lengths)
    now, old_logprobs, sampling_logprobs, ref_logprobs = (
        torch.tensor([x for i in kept for x in rows[i]])
        for rows in (step.now, step.old_logprobs, step.sampling_logprobs, step.ref_logprobs)
    )
    now.requires_grad_()
    share = row.factor * (1.0 if cfg.loss_agg_mode == "tokens" else len(kept) / len(step.masked))
    w = torch.tensor(sequence_weights(lengths, cfg.loss_agg_mode, MAX_TOKENS)).repeat_interleave(each) * share
    A = A[kept].repeat_interleave(each)
    loss = policy_loss(now, old_logprobs, sampling_logprobs, A, lengths, cfg, ref_logprobs) * w
    (slope,) = torch.autograd.grad(loss.sum(), now)
    policy = (
        policy_loss(
            now,
            old_logprobs,
            sampling_logprobs,
            A,
            lengths,
            cfg.model_copy(update={"kl_coef": 0.0}),
            ref_logprobs,
        )
        * w
    )
    (policy_slope,) = torch.autograd.grad(policy.sum(), now)
    x = ref_logprobs - now.detach()
    parts = kl_coef * (torch.exp(x) + x.abs() + 1) * w
    return loss.detach(), slope, policy.detach().abs() + parts, policy_slope.abs() + parts, lengths


def bound(magnitude: torch.Tensor, additions: int) -> torch.Tensor:
    """How far two evaluations may be apart."""
    return 2 * (12 + additions) * U * magnitude


def set_options(trainer, options: dict, kl_coef: float) -> None:
    """Two iterations a rollout, so that TRL scores a rollout under the weights it was sampled from, as it
    does with vLLM.
    """
    for name, value in (
        options | dict(beta=kl_coef, num_iterations=2, max_completion_length=MAX_TOKENS)
    ).items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)


def trls(trainer, step) -> tuple[torch.Tensor, float, torch.Tensor]:
    """TRL's advantages [P G], its loss, and the gradient of each kept token."""
    inputs = trainer.take(step)
    value, gradient = trainer.loss_and_gradient(inputs)
    assert not any(x for g, masked in zip(gradient, step.masked, strict=True) if masked for x in g)
    return (
        inputs["advantages"],
        value,
        torch.tensor([x for g, masked in zip(gradient, step.masked, strict=True) if not masked for x in g]),
    )


def agree(trainer, step, row: Row, kl_coef: float) -> bool:
    """Whether TRL's loss and gradient are ours."""
    set_options(trainer, row.trl, kl_coef)
    A, value, theirs = trls(trainer, step)
    loss, slope, size, slope_size, lengths = ours(step, A, row, kl_coef)
    assert math.isfinite(value)
    near = abs(loss.sum().item() - value) <= bound(size.sum(), len(loss)).item()
    return near and bool(((theirs - slope).abs() <= bound(slope_size, max(lengths))).all())


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient_are_trls(trainers, name, kl_coef):
    for seed in range(40):
        assert agree(trainers[0], drawn_step(seed), ROWS[name], kl_coef), seed


def wrong_choices(cfg: LossConfig) -> dict:
    """Each choice of a resolved loss, a little or wholly wrong."""
    wrong = {
        "loss_agg_mode": "tokens" if cfg.loss_agg_mode == "constant" else "constant",
        "clip_high": cfg.clip_high * 1.1,
        "ratio": "geometric" if cfg.ratio == "token" else "token",
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
    for choice, value in wrong_choices(LossConfig(**row.ours).resolve()).items():
        changed = dataclasses.replace(row, ours=row.ours | {choice: value})
        assert not all(agree(trainers[0], drawn_step(seed), changed, 0.04) for seed in range(40)), choice


@pytest.mark.parametrize("name", ROWS)
def test_in_fp32_the_error_is_at_most_twice_trls(trainers, name):
    """Of the gradient, each token's relative to the terms that it is the sum of; 100 steps such as training
    has. The judge is fp64.
    """
    row, kl_coef, rows = ROWS[name], 0.04, ([], [], [])
    set_options(trainers[0], row.trl, kl_coef)
    for seed in range(0, 400, 4):
        step = drawn_step(seed)
        torch.set_default_dtype(torch.float32)
        A, _, theirs = trls(trainers[0], step)
        mine = ours(step, A, row, kl_coef)[1]
        torch.set_default_dtype(torch.float64)
        _, exact, _, size, _ = ours(step, A.double(), row, kl_coef)
        for values, x in zip(rows, (mine, theirs, exact), strict=True):
            values.append(x.double() / size)
    mine, theirs, exact = map(torch.cat, rows)
    assert_at_most_twice_the_error(mine, theirs, exact, name)


@pytest.mark.parametrize(("kind", "scale"), [("std", "group"), ("mean", "none")])
def test_advantages_are_trls(trainers, kind, scale):
    trainer = trainers[0]
    trainer.scale_rewards = scale
    for seed in range(200):
        step = drawn_step(seed)
        rewards = np.array(step.rewards).reshape(-1, G)
        theirs = trainer.take(step)["advantages"].numpy().reshape(-1, G)
        deviation = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4 if kind == "std" else 1.0
        # Rewards are multiples of 1/8, so their sum is exact: the mean is off by a rounding of the largest
        # reward, and what is divided by the deviation, which has the same error relative to itself, is off by
        # as much.
        allowed = bound(1.0, G) * np.abs(rewards).max() / deviation * (1 + np.abs(theirs))
        assert (np.abs(advantages(rewards, kind) - theirs) <= allowed).all(), seed


def test_rloo_is_trls(trainers):
    """KL (k1, summed) in the reward, leave-one-out advantages, PPO's clip of the sequence's ratio. TRL's KL
    is that of its trainer at the weights sampled from, ours that of the sampler, whose log-probabilities are
    the trainer's: the step is drawn so.
    """
    trainer = trainers[1]
    trainer.beta, trainer.epsilon_low, trainer.epsilon_high = 0.05, 0.2, 0.2
    row = Row(
        {},
        dict(preset="rloo", importance_sampling_level="sequence", bound="clip", clip_low=0.2, clip_high=0.2),
        MAX_TOKENS,
    )
    reward_cfg = LossConfig(preset="rloo", kl_coef=0.05, kl="k1", kl_in="reward").resolve()
    found = {"clip_high": 0, "advantage": 0}
    for seed in range(120):
        step = drawn_step(seed)
        step.masked = [False] * len(step.masked)  # TRL leaves a masked sequence's KL out of its reward
        step.sampling_logprobs = step.old_logprobs
        A, value, theirs = trls(trainer, step)
        rewards = np.array(step.rewards).reshape(-1, G)
        rows = [np.array(x) for x in step.old_logprobs], [np.array(x) for x in step.ref_logprobs]
        shaped = shaped_rewards(rewards, step.lengths, reward_cfg, MAX_TOKENS, *rows)
        grouped = A.numpy().reshape(-1, G)
        assert (
            np.abs(advantages(shaped, "leave_one_out") - grouped) <= bound(1.0, G) * np.abs(shaped).max() * 2
        ).all(), seed
        found["advantage"] += not np.allclose(advantages(shaped, "mean"), grouped)
        for wrong in ({}, {"clip_high": 0.25}):
            changed = dataclasses.replace(row, ours=row.ours | wrong)
            loss, slope, size, slope_size, lengths = ours(step, A, changed, kl_coef=0.0)
            each = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
            equal = abs((loss / each).sum().item() - value) <= bound((size / each).sum(), len(loss)).item()
            equal = equal and bool(((theirs - slope).abs() <= bound(slope_size, max(lengths))).all())
            if wrong:
                found["clip_high"] += not equal
            else:
                assert equal, seed
    assert min(found.values()) > 0, "controls: another bound and another baseline are found"


def test_where_trl_has_no_number(trainers):
    """A ratio beyond fp64 and an advantage of 0: infinity times 0 in TRL, exactly 0 here."""
    step = drawn_step(0)
    step.rewards, step.masked = [0.5] * len(step.rewards), [False] * len(step.masked)
    step.now[0], step.old_logprobs[0] = [0.0] * len(step.now[0]), [-800.0] * len(step.now[0])
    set_options(trainers[0], _OWN, 0.0)
    A, value, theirs = trls(trainers[0], step)
    assert math.isnan(value)
    assert math.isnan(theirs[0])
    loss, slope, *_ = ours(step, A, ROWS["grpo"], 0.0)
    assert not loss.any()
    assert not slope.any()
