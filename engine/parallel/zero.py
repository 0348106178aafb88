"""Which rank keeps what: the fp32 master weights, the optimizer's moments and the gradient's sum are cut into
one slice for each rank.

As ZeRO's second stage (Rajbhandari et al., arXiv:1910.02054), but with sums of one order: a reduce_scatter
adds in the order of the library and the number of ranks, so here every rank's part of a slice goes to the
slice's owner, which adds the parts by the tree of gradient.py. A slice holds whole blocks of the ledger
(verify/ledger.py), so each is hashed by its owner alone.

Bytes a weight on each of W ranks, of bf16 or fp16 weights with S virtual shards: the weights to compute with
2, which sampling reads whole, and which the trainer reads in the sampler's place; the gradient of one shard
4; owned are (16 + 4 log2(S / W)) / W: master weights, two moments, the sum over the ranks, and its tree
(ranked.py). A checkpoint passes through the first rank's host memory, 12 bytes a weight.
"""

import torch
import torch.distributed as dist

from ...model.weights import FLAT_TILE, Layout
from ...verify.ledger import Hashing, Tree, tree_of
from .gradient import add_roots
from .ranks import ALONE, Ranks, peers

# Elements of a slice that are sent and added at a time: bounds the W parts that their owner holds.
_PIECE = 1 << 22


class Slices:
    """The slices of the flat tensors of `layout` (model/weights.py); `own` is that of this rank. Every method
    is for all ranks at once.

    Raises ChildProcessError from any of them when a rank has died.
    """

    def __init__(self, layout: Layout, ranks: Ranks = ALONE, device: torch.device | None = None):
        self.layout, self.ranks, self._device = layout, ranks, device
        self.parts = layout.cut(ranks.size)
        self.own = self.parts[ranks.rank]
        self.blocks = layout.blocks_in(self.own)
        self._sum: torch.Tensor | None = None

    @staticmethod
    def of_gradient(part: slice) -> slice:
        """What the owner of `part` needs of the gradient:

        to the end of the last FLAT_TILE that begins in it, for the norm's sums.
        """
        return slice(part.start, part.stop + -part.stop % FLAT_TILE) if part.start < part.stop else part

    def sum_roots(self, root: torch.Tensor | None, has: list[bool]) -> torch.Tensor | None:
        """This rank's part of the gradient (see of_gradient) from every rank's root [layout.numel] fp32; None
        when no rank has one.

        has: which ranks have a root. The others' are not added as zeros: -0.0 + 0.0 is not -0.0.
        """
        if self.ranks.size == 1 or not any(has):
            return root
        own = self.of_gradient(self.own)
        if self._sum is None:
            self._sum = torch.empty(own.stop - own.start, device=self._device)
        for owner, part in enumerate(map(self.of_gradient, self.parts)):
            for a in range(part.start, part.stop, _PIECE):
                at = slice(a, min(a + _PIECE, part.stop))
                if owner == self.ranks.rank:
                    self._sum[a - own.start : at.stop - own.start] = self._receive(root, has, at)
                elif root is not None:
                    with peers():
                        dist.send(root[at], owner)
        return self._sum

    def _receive(self, root: torch.Tensor | None, has: list[bool], at: slice) -> torch.Tensor | None:
        """The sum of all ranks' root[at], by the upper levels of the tree."""
        parts = [torch.empty(at.stop - at.start, device=self._device) if there else None for there in has]
        if root is not None:
            parts[self.ranks.rank] = root[at].clone()
        with peers():
            others = [(x, rank) for rank, x in enumerate(parts) if x is not None and rank != self.ranks.rank]
            for request in [dist.irecv(x, rank) for x, rank in others]:
                request.wait()
        return add_roots(parts)

    def share(self, flat: torch.Tensor) -> None:
        """Put every rank's slice of `flat` [layout.numel] in its place in all ranks."""
        if self.ranks.size == 1:
            return
        with peers():
            for owner, part in enumerate(self.parts):
                if part.start < part.stop:
                    dist.broadcast(
                        flat[part].view(torch.uint8), owner
                    )  # bytes: gloo does not know every dtype

    def everywhere(self, mine: torch.Tensor) -> torch.Tensor:
        """The whole tensor [layout.numel] in every rank, from the slice `mine` of each; `mine` itself without
        other ranks.
        """
        if self.ranks.size == 1:
            return mine
        flat = mine.new_empty(self.layout.numel)
        flat[self.own] = mine
        self.share(flat)
        return flat

    def collect(self, mine: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor [layout.numel] in rank 0, from the slice `mine` of each; None in the others.

        Without other ranks it is `mine` itself, else a tensor in the host's memory.
        """
        if self.ranks.size == 1:
            return mine
        if not self.ranks.first:
            if mine.numel():
                with peers():
                    dist.send(mine, 0)
            return None
        whole = torch.empty(self.layout.numel, dtype=mine.dtype)
        whole[self.own] = mine.cpu()
        for owner, part in enumerate(self.parts[1:], 1):
            if part.start < part.stop:
                theirs = mine.new_empty(part.stop - part.start)
                with peers():
                    dist.recv(theirs, owner)
                whole[part] = theirs.cpu()
        return whole

    def hashing(self, *parts: torch.Tensor) -> Hashing:
        """Begin to hash this rank's slice of a tensor, or several, of which each rank has its slice (or more
        after it).
        """
        host = [
            part.cpu() for part in parts
        ]  # at once: a copy from a GPU for every block would take its time
        return Hashing((name, [part[start:stop] for part in host]) for name, start, stop in self.blocks)

    def hash_tree(self, begun: Hashing) -> Tree:
        """The hash tree over all ranks' slices: blocks by their owners."""
        return tree_of([block for own in self.ranks.gather(begun.digests) for block in own])
