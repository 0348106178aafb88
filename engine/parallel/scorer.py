"""Log-probabilities of rollouts under weights that are not the trainer's current ones.

The weights are a frozen reference's, or the ones that the rollouts were sampled from.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.decoder import Decoder
from ...model.scoring import logprobs, pack
from ..rollout.types import Rollout
from .partition import micro_batches, virtual_shards
from .workers import Host, Workers


class Scorer:
    """Scores rollouts with the decoder of `workers`.

    Each worker scores a part of the rollouts, `micro_batch` sequences at a time.
    """

    def __init__(self, workers: Workers, micro_batch: int):
        self.workers, self.micro_batch = workers, micro_batch

    @property
    def decoder(self) -> Decoder:
        """The decoder whose log-probabilities the scores are."""
        return self.workers.host.decoder

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """logp [C] fp32 of each rollout's C completion tokens, by the trainer's forward; of none, none."""
        if not len(rollouts):
            return []
        parts = virtual_shards(rollouts, min(self.workers.n, len(rollouts)))
        items = [(list(part), sampling_params, self.micro_batch) for part in parts]
        return [logp for scores in self.workers.map(_score, items) for logp in scores]

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


def frozen(decoder: Decoder, shards: int, n: int, micro_batch: int) -> Scorer:
    """A scorer that owns its decoder and `n` workers."""
    return Scorer(Workers(decoder, shards, n), micro_batch)


@torch.no_grad()
def _score(host: Host, item: tuple[Sequence, SamplingParams, int]) -> list[np.ndarray]:
    rollouts, sampling_params, micro_batch = item
    scores = []
    for rows in micro_batches(len(rollouts), micro_batch):
        batch = pack([r.pair for r in rollouts[rows]], masks=[r.mask for r in rollouts[rows]])
        logp, _ = logprobs(host.decoder, batch, sampling_params)
        scores += [x.numpy() for x in logp.cpu().split(batch.drawn_lengths)]
    return scores
