"""Direct preference optimisation as a policy gradient (DPO, Rafailov et al., arXiv:2305.18290, equation 7).

A pair is a chosen and a rejected completion of one prompt. With logp the sum of the log-probabilities of a
completion's tokens, and ref that of the frozen reference,

    m    = beta ((logp_chosen - ref_chosen) - (logp_rejected - ref_rejected))       the margin, in nats
    loss = mean over pairs of -log sigmoid(m)

The derivative of -log sigmoid(m) by m is -sigmoid(-m), and that of m by the log-probability of a token is
beta for a token of the chosen completion, and -beta for one of the rejected. So

    d loss / d logp_t = -A / P,    A_chosen = beta sigmoid(-m),    A_rejected = -A_chosen

for each token t of a pair's completions. This is the gradient of the policy-gradient loss (policy_loss.py)
at the ratio r = 1, with A as advantages and the weight w = 1 / P (loss_agg_mode pairs). r is exactly 1 where
the log-probabilities that A is made of are those of the training pass, bit for bit. A step that made A of
other bits would have the gradient of another loss.

m is one sum of fp32 numbers, correctly rounded to fp64 (math.fsum), times beta.

Shapes: P pairs, C tokens of a completion.
"""

import math
from collections.abc import Sequence

import numpy as np


def margins(logprobs: Sequence[np.ndarray], ref_logprobs: Sequence[np.ndarray], beta: float) -> list[float]:
    """m [P]. logprobs, ref_logprobs: [2 P][C] fp32, of a pair's chosen completion, then its rejected one."""
    pairs = zip(logprobs, ref_logprobs, strict=True)
    terms = [[*logp.tolist(), *(-ref).tolist()] for logp, ref in pairs]
    return [
        beta * math.fsum([*chosen, *(-x for x in rejected)])
        for chosen, rejected in zip(terms[::2], terms[1::2], strict=True)
    ]


def pair_advantages(margins: Sequence[float], beta: float) -> np.ndarray:
    """A [P, 2] fp64 of the chosen and the rejected completion of each pair. margins [P]."""
    return np.array([[beta * _sigmoid(-m), -beta * _sigmoid(-m)] for m in margins])


def dpo_metrics(margins: Sequence[float]) -> dict[str, float]:
    """Loss, mean margin, and the share of pairs whose margin is above 0. margins [P]."""
    P = len(margins)
    losses = [max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins]
    return {
        "dpo/loss": math.fsum(losses) / P,
        "dpo/margin": math.fsum(margins) / P,
        "dpo/accuracy": sum(m > 0 for m in margins) / P,
    }


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)). No exponential here exceeds 1."""
    e = math.exp(-abs(x))
    return 1.0 / (1.0 + e) if x >= 0 else e / (1.0 + e)
