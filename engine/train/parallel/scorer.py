"""Log-probabilities of rollouts, each worker scoring a part of them.

The weights are a frozen reference's, or the ones that the rollouts were sampled from; or the trainer's own,
where tokens are trained that nobody drew (ScoringSampler).
"""

from collections.abc import Sequence

import numpy as np

from ....kernels.sampling_params import SamplingParams
from ....model.decoder import Decoder
from ....model.weights import fingerprint
from ...rollout.scoring_sampler import score_rollouts
from ...rollout.types import Rollout
from .partition import virtual_shards
from .workers import Host, ParallelSampler, Workers


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

    def fingerprint(self) -> str:
        """The hash of the decoder's weights, in the dtype that it computes in."""
        return fingerprint(self.decoder.layout, self.decoder.flat.detach())

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        """logp [C] fp32 of each rollout's C completion tokens, by the trainer's forward; of none, none."""
        return self._column("logp", rollouts, sampling_params)

    def values(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """The critic's values [C] fp32 of each rollout's C drawn tokens; of none, none.

        How the tokens were drawn decides no value.
        """
        return self._column("values", rollouts, SamplingParams())

    def _column(
        self, column: str, rollouts: Sequence[Rollout], sampling_params: SamplingParams
    ) -> list[np.ndarray]:
        if not len(rollouts):
            return []
        parts = virtual_shards(rollouts, min(self.workers.n, len(rollouts)))
        items = [(list(part), sampling_params, self.micro_batch, column) for part in parts]
        return [values for scores in self.workers.map(_score, items) for values in scores]

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


def frozen(decoder: Decoder, shards: int, n: int, micro_batch: int) -> Scorer:
    """A scorer that owns its decoder and `n` workers."""
    return Scorer(Workers(decoder, shards, n), micro_batch)


class WorkersSampler(ParallelSampler):
    """The native samplers of all workers. They also score given tokens (see ScoringSampler).

    micro_batch: sequences of one pass of a score.
    """

    def __init__(self, workers: Workers, micro_batch: int):
        super().__init__(workers)
        self._scorer = Scorer(workers, micro_batch)

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        return self._scorer.score(rollouts, sampling_params)


def _score(host: Host, item: tuple[Sequence[Rollout], SamplingParams, int, str]) -> list[np.ndarray]:
    return score_rollouts(host.decoder, *item)
