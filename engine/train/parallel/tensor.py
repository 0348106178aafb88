"""Tensor parallelism: ranks that share each layer, and its weights, as kernels/leaves.py cuts sums.

Along "tp" of a grid the ranks share layers: a rank has whole heads, and columns of the MLP and of the
vocabulary. It computes with them what its neighbours compute, and joins the sums that are cut with theirs. So
these see the same rows, draw the same tokens and know all scores. Of a vector that no rank cuts, such as a
norm, each has all. The ranks that have the same part draw other prompts, as ranks with whole weights do, and
have one slice each of the part (cut.py).
"""

import torch

from ....model.weights import Layout, fingerprint
from .cut import CutParts
from .process_group import Ranks
from .scorer import Scorer
from .spread import Cutting, Spread
from .workers import Workers


class TensorParts(CutParts):
    """What each rank of a grid owns of a model. part: of the layers' weights that it computes with.

    Frozen weights are cut in the same way, and are in no slice.
    """

    def __init__(self, layout: Layout, ranks: Ranks, device: torch.device | None = None):
        n = ranks.tensor_parallel.size
        ranges = [layout.ranges_of_rank(rank, n) for rank in range(n)]
        super().__init__(Cutting(layout, layout.of_rank(n), ranges), ranks, ranks.replicas, device)

    @property
    def sharing(self) -> Ranks:
        """The ranks that have one model together."""
        return self.ranks.tensor_parallel

    def model(self, flat: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """The layout of the whole model, and its weights in every rank (joined)."""
        return self.layout, self.joined(flat)

    def joined(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole flat tensor [layout.numel] in every rank, from the part of each. All ranks call it."""
        whole = flat.new_zeros(self.layout.numel)
        self.gather_into(whole, self.vector(flat[self.own.own]))
        ranks, place = self.sharing, slice(self.part.trained_numel, None)
        after = [(place.start, self.part.numel)]
        frozen = [list(self.cutting.places(rank, after)) for rank in range(ranks.size)]
        vector = torch.cat([flat[:0], *(flat[place][a:b] for _, (a, b) in frozen[ranks.rank])])
        Spread([[x for x, _ in places] for places in frozen], ranks).gather_into(whole, vector)
        return whole


class SharedScorer(Scorer):
    """A Scorer whose decoder has this rank's part of a model. Ranks along "tp" score the same rollouts."""

    def __init__(self, workers: Workers, micro_batch: int, parts: TensorParts):
        super().__init__(workers, micro_batch)
        self._parts = parts

    def fingerprint(self) -> str:
        """The hash of the whole model. All ranks call this together."""
        return fingerprint(*self._parts.model(self.decoder.flat.detach()))
