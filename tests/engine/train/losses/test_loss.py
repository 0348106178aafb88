"""Advantages and losses equal slow implementations of the papers' formulas, per token, in Python numbers."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.loss_section import PRESETS, LossConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.train.losses.advantage import advantages
from zerokl.engine.train.losses.policy_loss import kl_terms, policy_loss, sequence_weights
from zerokl.engine.train.losses.reward_shaping import completion_kl, shaped_rewards

from tests.helpers import property_settings
from tests.presets import DRAWN_PRESETS, REWARD_PRESETS

MAX_TOKENS = 7
EPS = 1e-4  # in GRPO's denominator; TRL's value
# Three logprobs of a token: the trainer's with the weights of now, the trainer's with the weights that were
# sampled from, and the sampler's.
Token = tuple[float, float, float]


def exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def slow_advantage(name: str, rewards: list[float], g: int) -> float:
    """Advantage of sample g of a group, by each paper's formula."""
    exact = [Fraction(r) for r in rewards]
    if name == "rloo":
        others = exact[:g] + exact[g + 1 :]
        return float(exact[g] - sum(others) / len(others))
    centred = float(exact[g] - sum(exact) / len(exact))
    if name in ("pg", "dr_grpo", "kimi", "seed_grpo"):
        return centred
    variance = sum((r - sum(exact) / len(exact)) ** 2 for r in exact) / (len(exact) - 1)
    return centred / (math.sqrt(variance) + EPS)


def ppo(r: float, A: float, low: float, high: float) -> tuple[float, float]:
    """PPO's objective of one ratio, and the derivative by log r."""
    bounded = min(max(r, 1 - low), 1 + high)
    return (r * A, r * A) if r * A <= bounded * A else (bounded * A, 0.0)


def slow_preset(name: str, sequence: list[Token], t: int, A: float) -> tuple[float, float]:
    """Objective of token t, which is maximised, and its derivative by the token's logp."""
    logp, old_logp, sampling_logp = sequence[t]
    r, rho = exp(logp - old_logp), exp(old_logp - sampling_logp)
    if A == 0 and name != "kimi":
        return 0.0, 0.0
    if name == "pg":
        return rho * r * A, rho * r * A
    if name == "rloo":
        return r * A, r * A
    if name == "gspo":
        return ppo(exp(sum(x - y for x, y, _ in sequence) / len(sequence)), A, 3e-4, 4e-4)
    if name == "cispo":
        return min(r, 5) * A * logp, min(r, 5) * A
    if name == "kimi":
        S = sum(x - y for x, y, _ in sequence)
        return A * logp - 0.05 * S * S / len(sequence), A - 0.1 * S
    value, slope = ppo(r, A, 0.2, 0.28 if name in ("dapo", "pass_at_k") else 0.2)
    if name == "tis":
        c = min(rho, 2)
    elif name == "mis":
        c = exp(sum(y - z for _, y, z in sequence))
        c = c if c <= 2 else 0
    elif name in ("mis_token", "icepop"):
        low, high = (0, 2) if name == "mis_token" else (0.5, 5)
        c = rho if low <= rho <= high else 0
    else:
        c = 1
    return c * value, c * slope


# Ratios at which an objective has a kink or a jump.
EDGES = {
    "gspo": (3e-4, 4e-4),
    "tis": (2,),
    "mis": (2,),
    "mis_token": (2,),
    "icepop": (0.5, 5),
    "cispo": (5,),
    "dapo": (0.2, 0.28),
    "pass_at_k": (0.2, 0.28),
}


def near(sequence: list[Token], t: int, edges: Sequence[float]) -> bool:
    """Whether a ratio of any level is so close to a jump that its last bit decides."""
    for i in (0, 1):
        total = sum(x[i] - x[i + 1] for x in sequence)
        for ratio in map(exp, (sequence[t][i] - sequence[t][i + 1], total, total / len(sequence))):
            if any(abs(ratio - edge) < 1e-9 for edge in edges):
                return True
    return False


def slow_weight(name: str, i: int, lengths: list[int]) -> float:
    """Share of a token of sequence i in the loss."""
    # Mean over a sequence, then over sequences.
    if name in ("grpo", "gspo", "tis", "mis", "mis_token", "icepop", "seed_grpo"):
        return 1 / len(lengths) / lengths[i]
    # Mean over all tokens of the step.
    if name in ("dapo", "reinforce++", "cispo", "pass_at_k", "ppo"):
        return 1 / sum(lengths)
    # A constant instead of the length.
    return 1 / len(lengths) / MAX_TOKENS


REWARD = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.1]), st.floats(-100, 100))
# logp of a token with the weights of now, and with those that were sampled from. A token that is less likely
# than 2^-53 is never drawn, because the uniform numbers have 53 bits; log 2^-53 is about -37.
NOW = st.one_of(st.just(-1.0), st.floats(-1.5, -0.5), st.floats(-800, 0))
THEN = st.one_of(st.just(-1.0), st.floats(-1.5, -0.5), st.floats(-37, 0))
SEQUENCE = st.lists(st.tuples(NOW, THEN, THEN), min_size=1, max_size=MAX_TOKENS)


@st.composite
def groups(draw) -> list[list[float]]:
    """Rewards [P][G]."""
    P, G = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    return draw(st.lists(st.lists(REWARD, min_size=G, max_size=G), min_size=P, max_size=P))


@pytest.mark.parametrize("name", [name for name in REWARD_PRESETS if name != "pass_at_k"])
@property_settings(60)
@given(groups())
def test_advantages_equal_the_formula(name, rewards):
    A = advantages(np.array(rewards), PRESETS[name]["advantage"])
    step = [r for group in rewards for r in group]
    divided = name not in ("pg", "dr_grpo", "rloo", "kimi", "seed_grpo")
    for p, group in enumerate(rewards):
        for g in range(len(group)):
            whole, index = (step, p * len(group) + g) if name == "reinforce++" else (group, g)
            expected = slow_advantage(name, whole, index)
            # Mean and difference are off by an ulp of the largest reward, and so is the deviation. Then they
            # are divided.
            scale = max(map(abs, whole)) / ((np.std(whole, ddof=1) + EPS) if divided else 1.0)
            assert A[p, g] == pytest.approx(expected, rel=1e-13, abs=1e-14 * scale * (1 + abs(expected)))


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out", "batch"])
@given(value=st.floats(-100, 100), P=st.integers(1, 4), G=st.integers(2, 9))
def test_a_step_of_equal_rewards_has_advantage_exactly_zero(kind, value, P, G):
    assert not advantages(np.full((P, G), value), kind).any()


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out"])
@given(value=st.floats(-100, 100), others=st.lists(REWARD, min_size=3, max_size=3))
def test_an_all_equal_group_has_advantage_exactly_zero(kind, value, others):
    assert not advantages(np.array([others, [value] * 3]), kind)[1].any()


@property_settings(100)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.booleans()), min_size=1, max_size=7), st.integers(1, 5)
)
@example([(1.0, True), (0.0, True), (0.0, False), (0.0, True)], 2)
def test_pass_at_k_is_the_mean_over_all_subsets(members, k):
    """Of the trained samples only: their number is n, and not that of the group."""
    trained = [i for i, (_, is_trained) in enumerate(members) if is_trained]
    subsets = [set(s) for s in combinations(trained, k)]
    solved = [max(members[i][0] for i in s) for s in subsets]
    expected = np.zeros(len(members))
    if len(set(solved)) == 2:
        advantages_of_subsets = (np.array(solved) - np.mean(solved)) / np.std(solved)
        pairs = list(zip(subsets, advantages_of_subsets, strict=True))
        for i in trained:
            expected[i] = np.mean([a for s, a in pairs if i in s])
    rewards, mask = zip(*members, strict=True)
    A = advantages(np.array([rewards]), "pass_at_k", np.array([mask]), k)
    assert A[0] == pytest.approx(expected, rel=1e-13, abs=1e-13)
    assert (A[0][expected == 0.0] == 0.0).all()


def test_pass_at_k_of_large_groups_is_exact():
    """C(2000, 1000) is beyond fp64. With one solved sample, 1 - q is k / n."""
    rewards = np.zeros((1, 2000))
    rewards[0, 7] = 1.0
    A = advantages(rewards, "pass_at_k", k=500)[0]
    assert A[7] == math.sqrt(3.0)
    assert np.delete(A, 7) == pytest.approx(-math.sqrt(3.0) / 1999, rel=1e-15)


def test_pass_at_k_refuses_a_graded_reward():
    with pytest.raises(
        ValueError, match=r'loss.advantage \("pass_at_k"\): the reward is 0\.5; it must be 0 or 1'
    ):
        advantages(np.array([[0.0, 1.0, 0.5]]), "pass_at_k", k=2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"preset": "pass_at_k", "k": 4}, r"loss\.k \(4\) must be less than num_generations \(4\)"),
        ({"preset": "dapo", "advantage": "pass_at_k"}, r"needs rewards that are 0 or 1.*overlong_share = 0"),
        ({"preset": "pass_at_k", "length_reward": 0.1}, r"needs rewards that are 0 or 1.*length_reward = 0"),
        ({"preset": "pass_at_k", "kl_coef": 0.1, "kl_in": "reward"}, r'needs rewards.*kl_in = "loss"'),
    ],
    ids=str,
)
def test_what_pass_at_k_cannot_do_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        check_settings(Config(loss=LossConfig(**loss), num_generations=4))
    check_settings(Config(loss=LossConfig(preset="pass_at_k", k=3, kl_coef=0.1), num_generations=4))


@pytest.mark.parametrize("kind", ["mean", "std", "leave_one_out", "batch"])
@given(rewards=st.lists(REWARD, min_size=5, max_size=5), order=st.permutations(range(5)))
def test_the_order_of_the_samples_does_not_change_a_bit(kind, rewards, order):
    A = advantages(np.array([rewards]), kind)
    assert (advantages(np.array([[rewards[i] for i in order]]), kind) == A[:, list(order)]).all()


def loss_and_gradient(
    sequences: list[list[Token]], A: list[float], cfg: LossConfig, dtype=torch.float64, reference=None
):
    """Loss and derivative of each token, all sequences in one call. reference: logprobs of the KL term."""
    lengths = [len(s) for s in sequences]
    tokens = torch.tensor([token for s in sequences for token in s], dtype=dtype)
    logp, old_logprobs, sampling_logprobs = tokens.T
    logp = logp.clone().requires_grad_()
    A_tokens = torch.tensor(A, dtype=dtype).repeat_interleave(torch.tensor(lengths))
    loss = policy_loss(logp, old_logprobs, sampling_logprobs, A_tokens, lengths, cfg, reference)
    loss.sum().backward()
    return loss.detach(), logp.grad


@pytest.mark.parametrize("name", DRAWN_PRESETS)
@property_settings(150)
@given(st.lists(st.tuples(SEQUENCE, st.floats(-3, 3)), min_size=1, max_size=4))
@example([([(-1.0, -1.0, -1.0)], 0.0)])  # one sequence of one token without advantage
@example([([(-800.0, -0.1, -37.0)] * 7, 2.0), ([(0.0, -37.0, -0.1)] * 7, -2.0)])
def test_every_preset_equals_its_paper(name, step):
    sequences, A = [s for s, _ in step], [a for _, a in step]
    loss, slope = loss_and_gradient(sequences, A, LossConfig(preset=name))
    edges = [e for edge in EDGES.get(name, (0.2,)) for e in (edge, 1 - edge, 1 + edge)]
    token = 0
    for sequence, a in step:
        # kimi subtracts, so its error is relative to what it subtracts.
        slack = 1e-12 * (1 + abs(a)) * 40 * len(sequence) if name == "kimi" else 1e-300
        for t in range(len(sequence)):
            value, derivative = slow_preset(name, sequence, t, a)
            if not near(sequence, t, edges):
                assert -loss[token].item() == pytest.approx(value, rel=1e-11, abs=slack)
                assert -slope[token].item() == pytest.approx(derivative, rel=1e-11, abs=slack)
            token += 1


def slow_choice(sequence: list[Token], t: int, A: float, cfg: LossConfig) -> tuple[float, float]:
    """The equations of policy_loss.py for one token."""

    def ratio(level: str, i: int, j: int) -> float:
        if level == "token":
            return exp(sequence[t][i] - sequence[t][j])
        total = math.fsum(x[i] - x[j] for x in sequence)
        return exp(total if level == "sequence" else total / len(sequence))

    r, rho = ratio(cfg.importance_sampling_level, 0, 1), ratio(cfg.correction_level, 1, 2)
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    inside = low <= r <= high
    value, slope = {
        "none": (r * A, r * A),
        "clip": ppo(r, A, cfg.clip_low, cfg.clip_high),
        "truncate": (min(r, high) * A, r * A if r <= high else 0.0),
        "mask": (r * A, r * A) if inside else (0.0, 0.0),
        "clip_weight": (min(max(r, low), high) * A * sequence[t][0], min(max(r, low), high) * A),
    }[cfg.bound]
    c = {
        "none": 1.0,
        "full": rho,
        "truncate": min(rho, cfg.correction_high),
        "mask": rho if cfg.correction_low <= rho <= cfg.correction_high else 0.0,
    }[cfg.correction]
    return c * value, c * slope


LEVEL = st.sampled_from(["token", "sequence", "geometric"])
# A configuration holds no number below 1e-37 but 0.
BOUND = st.one_of(st.just(0.0), st.floats(1e-37, 1))
CHOICES = st.fixed_dictionaries(
    {
        "importance_sampling_level": LEVEL,
        "bound": st.sampled_from(["none", "clip", "truncate", "mask", "clip_weight"]),
        "clip_low": BOUND,
        "clip_high": st.one_of(BOUND, st.floats(1, 9)),
        "correction": st.sampled_from(["none", "full", "truncate", "mask"]),
        "correction_level": LEVEL,
        "correction_low": BOUND,
        "correction_high": st.floats(1, 9),
    }
)


@property_settings(400)
@given(CHOICES, SEQUENCE, st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_every_combination_of_choices_equals_the_equations(choices, sequence, A):
    cfg = LossConfig(**choices)
    loss, slope = loss_and_gradient([sequence], [A], cfg)
    edges = (1 - cfg.clip_low, 1 + cfg.clip_high, cfg.correction_low, cfg.correction_high)
    for t in range(len(sequence)):
        value, derivative = slow_choice(sequence, t, A, cfg)
        if not near(sequence, t, edges):
            assert -loss[t].item() == pytest.approx(value, rel=1e-10, abs=1e-300)
            assert -slope[t].item() == pytest.approx(derivative, rel=1e-10, abs=1e-300)


ANY = st.one_of(
    st.just(-math.inf), st.just(0.0), st.floats(-(2.0**100), 0, width=32), st.floats(-2, 0, width=32)
)


@property_settings(400)
@given(
    CHOICES,
    st.lists(st.tuples(ANY, ANY, st.floats(-37, 0, width=32)), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0, -0.5]),
)
def test_no_ratio_however_extreme_makes_a_nan_of_a_gradient(choices, sequence, A):
    """An infinite gradient is an overflow, which is detected and named. A NaN would hide where it arose."""
    loss, slope = loss_and_gradient([sequence], [A], LossConfig(**choices), torch.float32)
    if A == 0.0:
        assert not loss.any()
        assert not slope.any()
    # Only tokens' ratios: the sum over a sequence may hold infinities of both signs.
    if choices["importance_sampling_level"] == choices["correction_level"] == "token":
        assert not torch.isnan(slope).any()


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_algorithm_has_the_plain_policy_gradient(name):
    sequence = [(-0.3, -0.3, -0.3), (-2.0, -2.0, -2.0), (-37.0, -37.0, -37.0)]
    for A in (0.5, -0.25):
        loss, slope = loss_and_gradient([sequence], [A], LossConfig(preset=name), torch.float32)
        assert torch.equal(slope, torch.full((3,), -A))
        logp = torch.tensor([x for x, _, _ in sequence])
        assert torch.equal(loss, logp * -A if name in ("cispo", "kimi") else torch.full((3,), -A))


@pytest.mark.parametrize("name", PRESETS)
def test_sequences_are_free_of_each_other(name):
    """The other sequences of a micro-batch change no bit of a sequence's loss."""
    generator = torch.Generator().manual_seed(0)
    sequences = [(torch.randn(n, 3, generator=generator) * 0.5 - 2).tolist() for n in (1, 5, 33, 2, 64)]
    A, cfg = [0.5, -1.0, 0.25, 0.0, 2.0], LossConfig(preset=name)
    loss, slope = loss_and_gradient(sequences, A, cfg, torch.float32)
    alone = [loss_and_gradient([s], [a], cfg, torch.float32) for s, a in zip(sequences, A, strict=True)]
    assert torch.equal(loss, torch.cat([x for x, _ in alone]))
    assert torch.equal(slope, torch.cat([x for _, x in alone]))


@pytest.mark.parametrize("name", DRAWN_PRESETS)
@given(lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=6))
def test_weights_equal_the_formula(name, lengths):
    weights = sequence_weights(lengths, PRESETS[name]["loss_agg_mode"], MAX_TOKENS)
    assert weights == pytest.approx([slow_weight(name, i, lengths) for i in range(len(lengths))], rel=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@property_settings(100)
@given(logp=st.floats(-30, 0), reference=st.floats(-30, 0))
def test_kl_estimators_and_their_derivatives(kind, logp, reference):
    x = reference - logp
    exact = {"k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x}[kind]
    slope = {"k1": 1.0, "k2": -x, "k3": -math.expm1(x)}[kind]
    ref = torch.tensor([reference], dtype=torch.float64)
    k, dk = (t.item() for t in kl_terms(torch.tensor([logp], dtype=torch.float64), ref, kind))
    assert k == pytest.approx(exact, rel=1e-12, abs=1e-14)
    assert dk == pytest.approx(slope, rel=1e-12, abs=1e-14)
    cfg = LossConfig(kl_coef=0.25, kl=kind)
    loss, gradient = loss_and_gradient([[(logp, logp, logp)]], [0.0], cfg, reference=ref)
    assert (loss.item(), gradient.item()) == pytest.approx((0.25 * k, 0.25 * dk), rel=1e-14)
    in_reward = cfg.model_copy(update={"kl_in": "reward"})
    loss, gradient = loss_and_gradient([[(logp, logp, logp)]], [0.0], in_reward, reference=ref)
    assert not loss.any()
    assert not gradient.any()


def test_rewards_are_shaped_as_the_papers_say():
    rewards, lengths = (
        np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]]),
        np.array([[4, 4, 8, 10], [3, 3, 3, 3]]),
    )
    dapo = shaped_rewards(rewards, lengths, LossConfig(preset="dapo", overlong_share=0.4), 10)
    assert dapo - rewards == pytest.approx(np.array([[0, 0, -0.5, -1], [0, 0, 0, 0]]))
    kimi = shaped_rewards(rewards, lengths, LossConfig(preset="kimi", length_reward=3.0), 10)
    assert kimi - rewards == pytest.approx(np.array([[1.5, 0.0, 3 * (0.5 - 4 / 6), -1.5], [0, 0, 0, 0]]))
    assert (shaped_rewards(rewards, lengths, LossConfig(preset="grpo"), 10) == rewards).all()


def test_kl_in_the_reward_is_taken_off_each_completion():
    rng = np.random.default_rng(0)
    logp, ref = ([rng.normal(-2, 1, n).astype(np.float32) for n in (1, 3, 2, 5)] for _ in range(2))
    cfg = LossConfig(kl_coef=0.5, kl="k1", kl_in="reward")
    sums = [math.fsum((a - b).tolist()) for a, b in zip(logp, ref, strict=True)]
    assert completion_kl(logp, ref, cfg).tolist() == sums
    kl = completion_kl(logp, ref, cfg).reshape(2, 2)
    shaped = shaped_rewards(np.ones((2, 2)), np.array([[1, 3], [2, 5]]), cfg, 8, kl=kl)
    assert shaped.reshape(-1).tolist() == [1 - 0.5 * s for s in sums]


def test_a_choice_overrides_its_preset():
    cfg = LossConfig(preset="dapo", clip_high=0.5)
    assert (cfg.clip_low, cfg.clip_high, cfg.loss_agg_mode) == (0.2, 0.5, "tokens")
    assert LossConfig.model_validate(cfg.model_dump()) == cfg


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_reference_that_cuts_a_drawn_token_is_refused(sampling):
    """Its logprob of this token is -inf. The loss, and with k2 the gradient, would be infinite or NaN."""
    with pytest.raises(ValueError, match=r"loss\.kl_coef \(0\.1\) with sampling\.top_k, top_p or min_p"):
        check_settings(Config(loss=LossConfig(kl_coef=0.1), sampling=sampling))
    check_settings(Config(loss=LossConfig(kl_coef=0.1)))
    check_settings(Config(sampling=sampling))


def test_a_mask_that_keeps_nothing_is_refused():
    message = r"correction_low \(2\.0\) must not exceed loss\.correction_high \(1\.0\)"
    with pytest.raises(ValueError, match=message):
        check_settings(Config(loss=LossConfig(correction_low=2.0, correction_high=1.0)))
