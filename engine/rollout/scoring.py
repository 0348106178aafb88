"""Scores of given tokens: their log-probabilities by the trainer's forward."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.decoder import Decoder
from ...model.scoring import logprobs, pack, scores
from .types import Rollout, Sampler


class ScoringSampler(Sampler, Protocol):
    """A sampler that also scores tokens which it did not draw, with the weights that it draws with."""

    @property
    def version(self) -> int:
        """Of the weights."""
        ...

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """logp [C] fp32 of each rollout's C tokens that its mask names; its own logprobs are not read."""
        ...


@torch.no_grad()
def score_rollouts(
    decoder: Decoder, rollouts: Sequence[Rollout], sampling_params: SamplingParams, micro_batch: int
) -> list[np.ndarray]:
    """logp [C] fp32 of each rollout's C drawn tokens, `micro_batch` sequences of one forward at a time."""
    scored: list[np.ndarray] = []
    for start in range(0, len(rollouts), micro_batch):
        part = rollouts[start : start + micro_batch]
        batch = pack([r.pair for r in part], masks=[r.mask for r in part])
        logp, _ = logprobs(decoder, batch, sampling_params)
        scored += [x.numpy() for x in logp.cpu().split(batch.drawn_lengths)]
    return scored


@torch.no_grad()
def score_values(decoder: Decoder, rollouts: Sequence[Rollout], micro_batch: int) -> list[np.ndarray]:
    """The critic's values [C] fp32 of each rollout's C drawn tokens; see score_rollouts.

    The decoder has a critic's head. What it would draw with decides no value.
    """
    values: list[np.ndarray] = []
    for start in range(0, len(rollouts), micro_batch):
        part = rollouts[start : start + micro_batch]
        batch = pack([r.pair for r in part], masks=[r.mask for r in part])
        of_batch = scores(decoder, batch, SamplingParams()).values
        values += [x.numpy() for x in of_batch.cpu().split(batch.drawn_lengths)]
    return values
