"""Context parallelism: ranks that share the rows of each forward, as kernels/shared_rows.py cuts them.

The ranks are a grid. Along "cp" they train the same virtual shards: outside of attention each has a part of
the rows, and inside it a part of the heads. All of them know all scores. Each sums a part of every weight's
gradient along axis 0, over all rows (cut.py). Along "dp" they have other virtual shards. All ranks have whole
weights, a slice each of the optimizer's state, and, as no forward of the sampler is shared, prompts of their
own to draw.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ....kernels.shared_rows import SharedRows
from ....model.shared_context import check_shared_rows
from ....model.weights import FlatLayout, Layout
from .cut import CutParts, CutWorkers
from .gradient import ShardsWork
from .process_group import Ranks
from .workers import Workers

X = TypeVar("X")
Y = TypeVar("Y")


class ContextParts(CutParts):
    """The part of a gradient that each rank of a grid sums."""

    def __init__(self, model: Layout, layout: FlatLayout, ranks: Ranks, device: torch.device | None = None):
        """layout: of what is trained. Raises ValueError where rows cannot be shared (check_shared_rows)."""
        n, trained = ranks.context_parallel.size, layout.trained
        check_shared_rows(model.config, trained, n)
        shapes = {
            entry.name: (
                (entry.shape[0] // n, *entry.shape[1:]),
                ((entry.name, entry.shape[0] // n),),
            )
            for entry in trained
        }
        ranges = [
            [(x.offset + rank * x.numel // n, x.offset + (rank + 1) * x.numel // n) for x in trained]
            for rank in range(n)
        ]
        super().__init__(layout, FlatLayout(shapes), ranges, ranks, device)


class ContextWorkers(CutWorkers):
    """CutWorkers of ranks that share rows along "cp"."""

    def __init__(self, workers: Workers, parts: ContextParts, virtual_shards: int):
        super().__init__(workers, parts, virtual_shards)
        self._shared = SharedRows(parts.ranks.context_parallel)

    def sum_shards(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """work: a dataclass whose `shared` says who shares the rows of a forward (shard.py)."""
        return super().sum_shards(replace(work, shared=self._shared), shards)
