"""VeriFree's advantages of tokens give the gradient of the probability of the answer, without bias."""

from itertools import product

import numpy as np
import pytest
import torch
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.run_config import Config
from zerokl.engine.train.losses.verifree import answer_advantages, answer_metrics


def test_the_expected_estimate_is_the_gradient_of_the_expected_probability():
    """A policy of three reasonings and two answers, in fp64, whose groups of two are all enumerated."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(3 + 6, generator=generator, dtype=torch.float64).requires_grad_()
    log_z, log_y = torch.log_softmax(theta[:3], 0), torch.log_softmax(theta[3:].view(3, 2), 1)[:, 0]
    (exact,) = torch.autograd.grad((log_z + log_y).exp().sum(), theta, retain_graph=True)
    p, R = log_z.exp().tolist(), log_y.exp().tolist()

    def estimate(group: tuple[int, ...], A: list[np.ndarray]) -> torch.Tensor:
        """The mean of A d logp over a group; a reasoning and an answer are one token each."""
        terms = [A[i][0] * log_z[z] + A[i][1] * log_y[z] for i, z in enumerate(group)]
        return torch.autograd.grad(sum(terms) / len(group), theta, retain_graph=True)[0]

    def expected(change: float) -> torch.Tensor:
        total = torch.zeros_like(theta)
        for group in product(range(3), repeat=2):
            A = answer_advantages(np.array([[R[z] for z in group]]), [2, 2], [1, 1])
            A = [a + np.array([0.0, change]) for a in A]
            total += p[group[0]] * p[group[1]] * estimate(group, A)
        return total

    assert torch.allclose(expected(0.0), exact, rtol=0, atol=2**-50)
    assert not torch.allclose(expected(1e-6), exact, rtol=0, atol=1e-8), "control: another weight of y*"


def test_each_token_has_the_advantage_of_its_part():
    A = answer_advantages(np.array([[0.5, 0.25, 0.0]]), [4, 2, 3], [1, 1, 2])
    assert [a.tolist() for a in A] == [[0.375] * 3 + [0.5], [0.0, 0.25], [-0.375, 0.0, 0.0]]
    assert {a.dtype for a in A} == {np.dtype(np.float64)}


def test_metrics():
    logprobs = [np.array([-9.0, -1.0, -2.0], np.float32), np.array([-9.0, -9.0, -5.0], np.float32)]
    metrics = answer_metrics(logprobs, [2, 1])
    assert metrics == {"verifree/answer_logp": -4.0, "verifree/reasoning_len": 1.5}


VERIFREE = {"task": {"answer_prefix": "="}, "loss": {"preset": "verifree"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {}}, r'loss\.advantage \("verifree"\) with task\.answer_prefix \(""\)'),
        (
            {"loss": {"preset": "rloo"}},
            r'loss\.advantage \("leave_one_out"\) with task\.answer_prefix \("="\)',
        ),
        ({"num_generations": 1}, r"num_generations \(1\) must be at least 2"),
        ({"updates_per_rollout": 2}, r"updates_per_rollout \(2\), .* the given tokens of dpo and verifree"),
        ({"max_staleness": 1}, r"max_staleness, .* the given tokens of dpo and verifree"),
        ({"sampler": "vllm-zerokl"}, r'sampler \("vllm-zerokl"\), .* the given tokens'),
        ({"sampling": {"top_p": 0.9}}, r"sampling\.top_k, top_p, .*: with verifree they could leave out"),
        ({"sampling": {"allowed_token_ids": [3, 4]}}, r"with verifree they could leave out"),
        ({"loss": {"preset": "verifree", "kl_coef": 0.1}}, r"have advantages of their own"),
        ({"loss": {"preset": "verifree", "overlong_share": 0.1}}, r"have advantages of their own"),
    ],
)
def test_what_does_not_go_with_verifree_is_refused_by_name(changes, message):
    check_settings(Config(**VERIFREE))
    check_settings(Config(**VERIFREE | {"sampling": {"temperature": 0.7}}))
    with pytest.raises(ValueError, match=message):
        check_settings(Config(**VERIFREE | changes))
