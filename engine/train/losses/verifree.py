"""Reinforcement without a verifier (VeriFree, Zhou et al., arXiv:2505.21493, section 2.2).

For a prompt x the model draws a reasoning z, and then the reference answer y* is put after it. What is
maximised is the probability that the model itself gives to this answer:

    J    = E_z [R],    R = pi(y* | x, z)
    dJ   = E_z [ (R - b) d log pi(z | x)  +  R d log pi(y* | x, z) ]

The second equation is the product rule: dR = R d log R, as R depends on the weights too.

- The first term is reinforcement. z is drawn, and R is its reward. The baseline b does not depend on z: it is
  the mean R of the other reasonings of the group, as in RLOO. So R - b is the advantage leave_one_out.
- The second term is supervision. Nobody drew y*: it is given, and its likelihood is raised with the weight R.
  There is no baseline, because y* is no sample.

Both are the policy-gradient loss (policy_loss.py), at the ratio 1, with advantages of tokens: R - b for each
token of z, R for each of y*. Between them stands a text that nobody drew and that is not trained on. The
weight w is that of the sequence for both, so the loss is -J times a constant where w is one
(loss_agg_mode constant).

R is exp of a correctly rounded sum of log-probabilities. It is the weight of its own gradient only where
these are those of the training pass, bit for bit; a run compares them (rollout/given_answers.py).

Shapes: P prompts, G reasonings of each, C tokens of a reasoning and its answer together.
"""

import math
from collections.abc import Sequence

import numpy as np

from .advantage import advantages


def answer_advantages(
    rewards: np.ndarray, lengths: Sequence[int], answer_lengths: Sequence[int]
) -> list[np.ndarray]:
    """A [P G][C] fp64. rewards [P, G]: R. lengths, answer_lengths [P G]: C, and how many the answer has."""
    A = advantages(rewards, "leave_one_out").reshape(-1).tolist()
    sequences = zip(A, rewards.reshape(-1).tolist(), lengths, answer_lengths, strict=True)
    return [np.repeat([a, R], [C - answer, answer]) for a, R, C, answer in sequences]


def answer_metrics(logprobs: Sequence[np.ndarray], answer_lengths: Sequence[int]) -> dict[str, float]:
    """The mean of log R, and the mean tokens of a reasoning. logprobs [P G][C]; answer_lengths [P G]."""
    pairs = list(zip(logprobs, answer_lengths, strict=True))
    log_R = [math.fsum(logp[-answer:].tolist()) for logp, answer in pairs]
    return {
        "verifree/answer_logp": math.fsum(log_R) / len(log_R),
        "verifree/reasoning_len": sum(len(logp) - answer for logp, answer in pairs) / len(pairs),
    }
