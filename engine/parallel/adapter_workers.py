"""The workers of a run that trains LoRA adapters: the gradient of the merged weights becomes the adapters'.

The tree sums the gradient of the merged weights over the step first (gradient.py). Then each adapter's
gradient is computed from it, a matrix at a time. So the micro-batches, the workers and the ranks decide no
bit of it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from ...model.adapters import Adapters
from .data_parallel import RankedWorkers
from .gradient import ShardsWork
from .workers import Workers
from .zero import Slices

X = TypeVar("X")
Y = TypeVar("Y")


class AdapterWorkers:
    """It has the interface of Workers, as far as training needs it.

    merged: the slices of the merged weights; own: of the adapters. Each rank computes the gradients of all
    adapters, for which it gets the whole gradient of the merged weights.
    """

    def __init__(self, workers: Workers | RankedWorkers, adapters: Adapters, merged: Slices, own: Slices):
        self._workers, self._adapters, self._merged, self._own = workers, adapters, merged, own

    @property
    def n(self) -> int:
        """Workers of this rank."""
        return self._workers.n

    def own_threads(self) -> AbstractContextManager[None]:
        return self._workers.own_threads()

    def sum_shards(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """See Workers.sum_shards. The sum is flat over the adapters, of which a rank gets its part."""
        results, dw = self._workers.sum_shards(work, shards)
        if dw is None:
            return results, None
        with self.own_threads():
            own = self._merged.own
            whole = self._merged.everywhere(dw[: own.stop - own.start]) if self._merged.ranks.size > 1 else dw
            gradient = self._adapters.gradient(whole)
        return results, gradient[self._own.of_gradient(self._own.own)]

    def close(self) -> None:
        """End this rank's other processes."""
        self._workers.close()
