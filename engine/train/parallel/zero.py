"""One slice for each rank: of the fp32 master weights, the optimizer's moments and the gradient's sum.

This is ZeRO's second stage (Rajbhandari et al., arXiv:1910.02054), but the order of the sums is fixed. A
reduce_scatter adds in an order that depends on the library and on the number of ranks. Here every rank sends
its part of a slice to the owner of the slice, and the owner adds the parts by the tree of gradient.py. A
slice holds whole blocks of the ledger (verify/ledger.py), so the owner hashes each block alone.

Memory on each of W ranks, in bytes per weight, for bf16 or fp16 weights and S virtual shards. A rank adds up
A of its shards before the ranks exchange the sums: all S / W on a CPU, and on a GPU as many as the memory
allows (runs/memory.py).

    2                            weights to compute with, which sampler and trainer share; sampling needs all
    4 + 4 log2(A)                gradient of one shard, and the tree of A shards
    (16 + 4 log2(S / (A W))) / W the rank's slice: master weights, two moments, the sum over the ranks, and
                                 the tree of this sum over the exchanges (data_parallel.py)

A checkpoint passes through the host memory of rank 0 and needs 12 bytes per weight there.
"""

import torch

from ....model.weights import FLAT_TILE, FlatLayout
from ....verify.ledger import Tree, tree_of
from .gradient import tree_reduce_scatter
from .process_group import ALONE, Ranks, peers
from .spread import Spread
from .tree_hash import Hashing

# Elements of each slice that are sent and added at a time. This bounds the W parts that a rank holds.
_PIECE = 1 << 22


class Slices(Spread):
    """The slices of what `layout` (model/weights.py) trains; `own` is the slice of this rank."""

    def __init__(self, layout: FlatLayout, ranks: Ranks = ALONE, device: torch.device | None = None):
        self.layout, self._device, self.parts = layout, device, layout.cut(ranks.size)
        super().__init__([[(part.start, part.stop)] for part in self.parts], ranks)
        self.own = self.parts[ranks.rank]
        self.blocks = layout.blocks_in(self.own)
        self._sum: torch.Tensor | None = None

    @staticmethod
    def of_gradient(part: slice) -> slice:
        """The slice of the gradient that the owner of `part` needs.

        It goes to the end of the last FLAT_TILE that begins in `part`, because the norm sums whole tiles.
        """
        return slice(part.start, part.stop + -part.stop % FLAT_TILE) if part.start < part.stop else part

    def sum_roots(self, root: torch.Tensor | None, has_root: list[bool]) -> torch.Tensor | None:
        """This rank's part of the gradient (see of_gradient), summed over the root of every rank.

        root: this rank's, [layout.trained_numel] fp32. has_root: which ranks have a root (see
        tree_reduce_scatter). Returns None when no rank has a root.
        """
        if self.ranks.size == 1 or not any(has_root):
            return root
        parts = list(map(self.of_gradient, self.parts))
        part = parts[self.ranks.rank]
        if self._sum is None:
            self._sum = torch.empty(part.stop - part.start, device=self._device)
        nothing = self._sum[:0]
        for start in range(0, max(part.stop - part.start for part in parts), _PIECE):
            pieces = [slice(p.start + start, min(p.start + start + _PIECE, p.stop)) for p in parts]
            lengths = [max(0, p.stop - p.start) for p in pieces]
            outgoing = nothing if root is None else torch.cat([root[p] for p in pieces])
            with peers():
                total = tree_reduce_scatter(self.ranks.group, outgoing, lengths, has_root)
            self._sum[start : start + len(total)] = total
        return self._sum

    def share(self, flat: torch.Tensor) -> None:
        """Copy every rank's slice of `flat` [layout.numel] to the same place in all other ranks."""
        self.gather_into(flat, flat[self.own])

    def everywhere(self, own_slice: torch.Tensor) -> torch.Tensor:
        """The whole tensor [layout.trained_numel] in every rank, from the `own_slice` of each rank.

        Without other ranks this is `own_slice` itself.
        """
        if self.ranks.size == 1:
            return own_slice
        flat = own_slice.new_empty(self.layout.trained_numel)
        self.gather_into(flat, own_slice)
        return flat

    def collect(self, own_slice: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor [layout.trained_numel] in rank 0, from the `own_slice` of each rank.

        The other ranks get None. Without other ranks this is `own_slice` itself. Otherwise it is a tensor in
        the host's memory.
        """
        if self.ranks.size == 1:
            return own_slice
        if not self.ranks.first:
            if own_slice.numel():
                self.ranks.send(own_slice, 0)
            return None
        whole = torch.empty(self.layout.trained_numel, dtype=own_slice.dtype)
        whole[self.own] = own_slice.cpu()
        for owner, part in enumerate(self.parts[1:], 1):
            if part.start < part.stop:
                received = own_slice.new_empty(part.stop - part.start)
                self.ranks.receive(received, owner)
                whole[part] = received.cpu()
        return whole

    def hashing(self, *tensors: torch.Tensor) -> Hashing:
        """Begin to hash this rank's slice of a quantity that one or several tensors make up.

        tensors: this rank's slice of each; elements after the end of the slice are ignored.
        """
        return Hashing(self.blocks, *tensors, device=self._device)

    def hash_tree(self, hashing: Hashing) -> Tree:
        """The hash tree over the slices of all ranks; each block is hashed by its owner."""
        return tree_of(leaf for leaves in self.ranks.gather(hashing.leaves) for leaf in leaves)
