"""The weights of the last steps, for a sampler that draws each step with those of `lag` steps before."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Snapshot(NamedTuple):
    """The weights that a step began with, [numel] each.

    sampled: the sampler's, in its dtype. scored: the trainer's, in its own; the same tensor where the two do
    not differ. version: the number of optimizer updates before.
    """

    version: int
    sampled: torch.Tensor
    scored: torch.Tensor


class OlderWeights:
    """The snapshots of the newest step and of the `lag` steps before, as far as there were so many."""

    def __init__(self, lag: int):
        self.lag = lag
        self._kept: deque[Snapshot] = deque(maxlen=lag + 1)

    def push(self, snapshot: Snapshot) -> None:
        """Add those of the next step."""
        self._kept.append(snapshot)

    def due(self, ahead: int = 0) -> Snapshot:
        """Those that draw the step which comes `ahead` (0 to lag) steps after the newest.

        Before step `lag` they are the first ones.
        """
        assert 0 <= ahead <= self.lag
        return self._kept[max(0, len(self._kept) - 1 - self.lag + ahead)]

    @property
    def before(self) -> list[Snapshot]:
        """All but the newest, oldest first: what a checkpoint needs beside the weights themselves."""
        return list(self._kept)[:-1]

    @property
    def versions(self) -> set[int]:
        """Of all that are kept."""
        return {snapshot.version for snapshot in self._kept}

    def reset(self, before: Iterable[Snapshot] = ()) -> None:
        """Forget all, and begin again after the steps `before`, oldest first."""
        self._kept.clear()
        self._kept.extend(before)
