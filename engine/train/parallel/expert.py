"""Expert parallelism: ranks that share the experts of each layer, as kernels/shared_experts.py has them.

The ranks are a grid. Along "ep" each has an equal part of the experts, and all other weights. They compute
every token of their row together: each the rows of its experts, and all of them the rest of a layer. So the
gradient of an expert is whole in the rank that has it, and that of any other weight is in all of them. Along
"dp" they have parts of the prompts and of the virtual shards, as ranks with whole weights do, and one slice
each of what the ranks of their column have (cut.py).
"""

import torch

from ....model.config import ModelConfig
from ....model.weights import Layout
from .cut import CutParts
from .process_group import Ranks
from .spread import Cutting
from .tensor import TensorParts


def check_shared_experts(config: ModelConfig, ranks: int) -> None:
    """Raise ValueError for a model without experts, and for ranks that do not divide them."""
    if config.experts is None:
        raise ValueError(f"parallel.expert ({ranks}): a {config.architecture} has no experts; set it to 1")
    if config.experts.number % ranks:
        raise ValueError(
            f"parallel.expert ({ranks}) must divide the experts of a layer ({config.experts.number}); choose "
            "another number"
        )


class ExpertParts(TensorParts):
    """What each rank of a grid owns of a model, of which it has a part of the experts.

    Raises ValueError (see check_shared_experts).
    """

    def __init__(self, layout: Layout, ranks: Ranks, device: torch.device | None = None):
        n = ranks.expert_parallel.size
        check_shared_experts(layout.config, n)
        ranges = [layout.ranges_of_expert_rank(rank, n) for rank in range(n)]
        cutting = Cutting(layout, layout.of_expert_rank(n), ranges)
        CutParts.__init__(self, cutting, ranks, ranks.replicas, device)

    @property
    def sharing(self) -> Ranks:
        return self.ranks.expert_parallel
