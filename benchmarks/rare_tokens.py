"""Surrogates that leave some tokens with a negative advantage out, for rare_tokens.toml.

Published collapses are put down to them: a sampler with a mismatch draws tokens that the trainer thinks
unlikely, and pushing these down further moves the other logits the most. Each of these is the plain f A = r A
with the ratio r, and 0 for the tokens that it leaves out.

Shapes: C tokens; r, A, logp, value, slope [C] fp32.
"""

import math

import torch

RARE = math.log(1e-2)  # a token of a lower log-probability under the trainer is rare
# Share of the negative tokens that are rare, in the first ten steps of a late run of seed 50.
SHARE = 0.02


def _without(left_out, r, A):
    value = torch.where((A < 0) & left_out, 0.0, r * A)
    return value, value


def no_negative(r, A, logp, low, high):
    """Only what was good is learnt from."""
    return _without(torch.ones_like(A, dtype=torch.bool), r, A)


def no_rare(r, A, logp, low, high):
    """Without the rare ones among the negative tokens."""
    return _without(logp < RARE, r, A)


def no_random(r, A, logp, low, high):
    """Without as many negative tokens, whichever they are: the last bits of logp choose."""
    return _without((logp.abs() * 8192.0).frac() < SHARE, r, A)
