"""DPO's margins, loss and advantages against autograd of -log sigmoid(m), written another way, in fp64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.train.losses.dpo import dpo_metrics, margins, pair_advantages
from zerokl.engine.train.losses.policy_loss import policy_loss, sequence_weights

from tests.helpers import property_settings

TOKEN = st.floats(-30, 0, width=32)
COMPLETION = st.lists(st.tuples(TOKEN, TOKEN), min_size=1, max_size=5)  # log-probabilities, ours and ref
PAIRS = st.lists(st.tuples(COMPLETION, COMPLETION), min_size=1, max_size=4)


def of_paper(pairs: list, beta: float) -> tuple[float, torch.Tensor]:
    """Equation 7 of the paper, and its gradient by each token's log-probability, by autograd in fp64."""
    tokens = [x for pair in pairs for completion in pair for x in completion]
    logp = torch.tensor([x for x, _ in tokens], dtype=torch.float64, requires_grad=True)
    log_ratios = iter(logp - torch.tensor([ref for _, ref in tokens], dtype=torch.float64))
    losses = []
    for pair in pairs:
        chosen, rejected = (sum(next(log_ratios) for _ in completion) for completion in pair)
        losses.append(-torch.nn.functional.logsigmoid(beta * chosen - beta * rejected))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), logp.grad


def ours(pairs: list, beta: float) -> tuple[float, torch.Tensor]:
    """The loss of the metric, and the gradient of the policy-gradient loss."""
    completions = [np.array(c, np.float32) for pair in pairs for c in pair]
    logprobs, ref_logprobs = [c[:, 0] for c in completions], [c[:, 1] for c in completions]
    m = margins(logprobs, ref_logprobs, beta)
    lengths = [len(x) for x in logprobs]
    counts = torch.tensor(lengths)
    A = torch.from_numpy(pair_advantages(m, beta)).reshape(-1).repeat_interleave(counts)
    w = torch.tensor(sequence_weights(lengths, "pairs", 7), dtype=torch.float64).repeat_interleave(counts)
    logp = torch.from_numpy(np.concatenate(logprobs)).double().requires_grad_()
    now, cfg = logp.detach(), LossConfig(preset="dpo")
    (policy_loss(logp, now, now, A, lengths, cfg) * w).sum().backward()
    return dpo_metrics(m)["dpo/loss"], logp.grad


@property_settings(200)
@given(PAIRS, st.sampled_from([0.01, 0.1, 1.0, 5.0]))
def test_loss_and_gradient_are_those_of_the_paper(pairs, beta):
    loss, gradient = ours(pairs, beta)
    expected, expected_gradient = of_paper(pairs, beta)
    # m is a sum of up to 20 terms of at most 30, times beta; a relative error of the sigmoid is one of m.
    slack = 2**-50 * (1 + beta * 20 * 30)
    assert loss == pytest.approx(expected, rel=slack, abs=1e-300)
    assert torch.allclose(gradient, expected_gradient, rtol=slack, atol=1e-300)


def test_control_a_wrong_beta_or_side_is_found():
    pairs = [([(-1.0, -1.5), (-2.0, -2.25)], [(-3.0, -2.5)])]
    _, expected = of_paper(pairs, 0.1)
    assert not torch.allclose(ours(pairs, 0.11)[1], expected, rtol=1e-3)
    assert not torch.allclose(ours([pairs[0][::-1]], 0.1)[1], expected, rtol=1e-3)


def test_metrics_of_pairs_with_known_margins():
    m = [0.0, math.log(3.0), -1000.0, 1000.0]
    metrics = dpo_metrics(m)
    assert metrics["dpo/loss"] == pytest.approx((math.log(2) + math.log(4 / 3) + 1000.0 + 0.0) / 4, rel=1e-15)
    assert metrics["dpo/margin"] == pytest.approx(math.log(3.0) / 4, rel=1e-15)
    assert metrics["dpo/accuracy"] == 0.5, "a margin of 0 prefers nothing"
    assert pair_advantages([0.0, 1000.0, -1000.0], 0.5).tolist() == [[0.25, -0.25], [0.0, -0.0], [0.5, -0.5]]


DPO = {"task": {"name": "pairs"}, "num_generations": 2, "loss": {"preset": "dpo"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"name": "jsonl"}}, r'loss\.advantage \("dpo"\) with task\.name \("jsonl"\)'),
        ({"loss": {"preset": "grpo"}}, r'loss\.advantage \("std"\) with task\.name \("pairs"\)'),
        ({"num_generations": 4}, r"num_generations \(4\) must be 2 with DPO"),
        (
            {"loss": {"preset": "dpo", "loss_agg_mode": "tokens"}},
            r'loss_agg_mode \("tokens"\): DPO is the mean',
        ),
        ({"updates_per_rollout": 2}, r"updates_per_rollout \(2\), max_staleness, sampler"),
        ({"max_staleness": 1}, r"updates_per_rollout \(1\), max_staleness, sampler"),
        ({"sampler": "vllm-zerokl"}, r'sampler \("vllm-zerokl"\), perturb'),
        ({"perturb": {"logit_noise": 0.1}, "exact": False}, r"perturb\.\* and precision"),
        (
            {"precision": {"sampler_dtype": "bfloat16"}, "exact": False},
            r"precision\.sampler_\*: the given tokens",
        ),
        (
            {"sampling": {"top_k": 3}},
            r"sampling\.temperature, top_k, top_p, min_p, .*: nothing is drawn in DPO",
        ),
        ({"sampling": {"temperature": 0.7}}, r"nothing is drawn in DPO"),
        ({"sampling": {"logit_bias": {3: 1.0}}}, r"nothing is drawn in DPO"),
        ({"loss": {"preset": "dpo", "kl_coef": 0.1}}, r"loss\.kl_coef, .*: dpo and verifree have advantages"),
        ({"loss": {"preset": "dpo", "surrogate": "toy:ppo"}}, r"have advantages of their own"),
        ({"loss": {"preset": "dpo", "max_resamples": 2}}, r"have advantages of their own"),
    ],
)
def test_what_does_not_go_with_dpo_is_refused_by_name(changes, message):
    check_settings(Config(**DPO))
    with pytest.raises(ValueError, match=message):
        check_settings(Config(**DPO | changes))


def test_pairs_are_no_loss_of_drawn_completions():
    with pytest.raises(
        ValueError, match=r'loss_agg_mode \("pairs"\): DPO is the mean over pairs, and no other'
    ):
        check_settings(Config(loss={"loss_agg_mode": "pairs"}))
    with pytest.raises(ValueError, match=r"loss\.beta \(0\.04\) is DPO's, .* a KL term is loss\.kl_coef"):
        check_settings(Config(loss={"preset": "grpo", "beta": 0.04}))
