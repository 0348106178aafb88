"""Context parallelism: ranks that share the rows of each forward, as kernels/shared_rows.py cuts them.

Along "cp" of a grid the ranks train the same virtual shards: outside of attention each has a part of the
rows, and inside it a part of the heads. All of them know all scores. Each sums a part of every weight's
gradient along axis 0, over all rows (cut.py). All of them have the same weights, a slice each of the
optimizer's state, and, as no forward of the sampler is shared, prompts of their own to draw.
"""

import torch

from ....model.config import ModelConfig
from ....model.shared_context import check_shared_rows
from ....model.weights import FlatLayout
from .cut import CutParts
from .process_group import Ranks
from .spread import Cutting


def rows_cut(layout: FlatLayout, n: int) -> Cutting:
    """Of n ranks, each has an equal part of the rows of what is trained."""
    trained = layout.trained
    shapes = {
        entry.name: ((entry.shape[0] // n, *entry.shape[1:]), ((entry.name, entry.shape[0] // n),))
        for entry in trained
    }
    ranges = [
        [(x.offset + rank * x.numel // n, x.offset + (rank + 1) * x.numel // n) for x in trained]
        for rank in range(n)
    ]
    return Cutting(layout, FlatLayout(shapes), ranges)


class ContextParts(CutParts):
    """The part of a gradient that each rank of a grid sums."""

    def __init__(
        self, config: ModelConfig, cutting: Cutting, ranks: Ranks, device: torch.device | None = None
    ):
        """config: of what a rank computes with. cutting: of what is trained, along "tp".

        Raises ValueError where rows cannot be shared (check_shared_rows).
        """
        n = ranks.context_parallel.size
        check_shared_rows(config, cutting.part.trained, n)
        super().__init__(cutting.then(rows_cut(cutting.part, n)), ranks, ranks.data_parallel, device)
