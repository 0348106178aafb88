"""Scores of given tokens: their log-probabilities by the trainer's forward."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.decoder import Decoder
from ...model.scoring import pack, scores
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
    decoder: Decoder,
    rollouts: Sequence[Rollout],
    sampling_params: SamplingParams,
    micro_batch: int,
    column: Literal["logp", "values"] = "logp",
) -> list[np.ndarray]:
    """A column of Scores, [C] fp32 of each rollout's C drawn tokens.

    micro_batch: sequences of one forward. The column `values` needs a decoder with a critic's head.
    """
    scored: list[np.ndarray] = []
    for start in range(0, len(rollouts), micro_batch):
        part = rollouts[start : start + micro_batch]
        batch = pack([r.pair for r in part], masks=[r.mask for r in part])
        batch_scores = getattr(scores(decoder, batch, sampling_params), column)
        scored += [x.numpy() for x in batch_scores.cpu().split(batch.drawn_lengths)]
    return scored
