"""The gradient of a step: virtual shards as the leaves of one fixed binary tree.

All tensors here are flat over what is trained, [numel] fp32: weights (model/weights.py), or the adapters of
LoRA (model/adapters.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from ....kernels.grad import GradBuffer, PendingSums
from ....model.adapters import AdapterLayout, adapter_buffers
from ....model.causal_lm import CausalLM
from ....model.context import Buffers
from ....model.decoder import Decoder
from ....model.offload import HERE, Offload
from ....model.weights import FlatLayout

X = TypeVar("X")
Y = TypeVar("Y")
# Adds the gradients of some virtual shards to the buffers, and returns a result for each shard; None is an
# empty shard.
ShardsWork = Callable[[Decoder, Sequence[X | None], Buffers], list[Y | None]]


class OnePassWork(Protocol[X, Y]):
    """The work of one virtual shard in one forward and one backward."""

    def has_gradient(self, shard: X) -> bool:
        """Whether the loss of this shard has a gradient."""
        ...

    def one_pass(self, model: CausalLM, shard: X, backward: bool) -> Y:
        """Its forward and, if asked for, its backward. The gradients are then in the Parameters' .grad."""
        ...


class GradientTree:
    """Adds the shards of a step as the leaves of a perfect binary tree.

    It works as a binary counter: level k holds the sum of 2^k consecutive shards until the next such sum
    arrives. It therefore holds at most log2(shards) partial sums.
    """

    def __init__(self, shards: int, offload: Offload = HERE, device: torch.device | None = None):
        """offload: where the partial sums lie. device: that adds them, and has the leaves."""
        self.shards, self._offload, self._device = shards, offload, device or torch.device("cpu")
        self._levels: dict[int, torch.Tensor | None] = {}
        self._spare: list[torch.Tensor] = []
        self.pushed = 0

    def push(self, leaf: torch.Tensor | None) -> None:
        """Add the next shard's gradient [numel]; None for a shard without sequences.

        The caller may reuse `leaf` afterwards. With one shard in all, `leaf` itself is the root until the
        next push.
        """
        if self.shards == 1:
            self._levels, self.pushed = {0: leaf}, 1
            return
        level, sums = 0, []
        while level in self._levels:
            sums.append(self._levels.pop(level))
            level += 1
        sums = [x for x in sums if x is not None]
        if leaf is not None or len(sums) > 1:
            self._levels[level] = self._added(leaf, sums)
        else:
            self._levels[level] = sums[0] if sums else None
        self.pushed += 1

    def _added(self, leaf: torch.Tensor | None, sums: list[torch.Tensor]) -> torch.Tensor:
        """The leaf added to the first of some sums, this to the next one, and so on. It takes their memory.

        So where they lie beside the device, each is read once, and one is written.
        """
        offload, device, total = self._offload, self._device, sums[-1] if sums else None
        if total is None:
            total = self._spare.pop() if self._spare else offload.empty(len(leaf), leaf.device)
        for part in offload.slices(len(total)):
            carry = None if leaf is None else leaf[part]
            for left in sums:
                left_part = left[part].to(device, copy=True) if offload.away else left[part]
                carry = left_part if carry is None else left_part.add_(carry)
            if offload.away or not sums:  # else the last sum has become the total
                total[part].copy_(carry)
        self._spare += sums[:-1]
        return total

    def take(self) -> torch.Tensor | None:
        """The root, once every shard was pushed; None if all shards were empty.

        This empties the tree. The root is valid until the next push.
        """
        assert self.pushed == self.shards, f"{self.pushed} of {self.shards} shards were pushed"
        (root,) = self._levels.values()
        self._levels, self.pushed = {}, 0
        if root is not None and self.shards > 1:
            self._spare.append(root)
        return root


class TrainedAdapters(NamedTuple):
    """LoRA adapters as a worker knows them."""

    layout: AdapterLayout
    flat: torch.Tensor  # [layout.numel] fp32, in the memory that the optimizer changes


class ShardSum:
    """The sum, by a tree, of the gradients of consecutive virtual shards, all computed with one decoder.

    `in_flight` shards are computed together, each with a gradient buffer of its own: a pass over the samples
    of several shards keeps a GPU busy. With `adapters`, these are trained in place of the decoder's weights.
    part: of the trained weights, which this rank sums (ulysses.py); None for all of them.
    """

    def __init__(
        self,
        decoder: Decoder,
        shards: int,
        in_flight: int = 1,
        adapters: TrainedAdapters | None = None,
        part: FlatLayout | None = None,
    ):
        self.decoder, self.in_flight = decoder, min(in_flight, shards)
        self.tree = GradientTree(shards, decoder.offload, decoder.device)
        layout = part or (adapters.layout if adapters else decoder.layout)
        # Zeros, for what lies between the weights.
        self._leaves = torch.zeros(self.in_flight, layout.trained_numel, device=decoder.device)
        # The gradients of norms and biases wait for each other, so that few launches add them.
        pending, sums = PendingSums(), {}
        for entry in layout.trained:
            leaf = self._leaves[:, entry.offset : entry.offset + entry.numel].view(-1, *entry.shape)
            is_vector = len(entry.shape) == 1
            sums[entry.name] = GradBuffer(leaf, pending=pending if is_vector else None)
        self._tied, self._small, self._products = None, list(sums.values()), []
        self.buffers: Buffers = (
            adapter_buffers(*adapters, decoder.w, sums) if adapters else self._of_weights(sums, layout)
        )

    def _of_weights(
        self, sums: Mapping[str, GradBuffer], layout: FlatLayout
    ) -> dict[torch.Tensor, GradBuffer]:
        """The buffer of each weight that is trained, and lm_head's. sums: by the names in `layout`."""
        decoder = self.decoder
        buffers = {decoder.w[name]: buffer for name, buffer in sums.items()}
        # With tied embeddings lm_head has a gradient buffer of its own (see Decoder). It is added to the
        # embedding's gradient at the end of each shard.
        if decoder.config.tied and decoder.lm_head.requires_grad:
            shape = (self.in_flight, *layout.entries["embed"].shape)
            self._tied = torch.empty(shape, device=decoder.device)
            buffers[decoder.lm_head] = GradBuffer(self._tied)
        # The weights of products have nearly all bytes, and their kernels can write over an empty buffer.
        self._products = [buffers[w] for w in decoder.matrices() if w in buffers]
        products = set(self._products)
        self._small = [buffer for buffer in buffers.values() if buffer not in products]
        return buffers

    def add(self, work: ShardsWork, shards: Sequence[X | None]) -> list[Y | None]:
        """Run the backward passes of the next shards by `work`, and return a result for each shard.

        work(decoder, shards, buffers) takes `in_flight` shards. None is a shard without sequences.
        """
        results: list[Y | None] = []
        for start in range(0, len(shards), self.in_flight):
            together = shards[start : start + self.in_flight]
            present = [i for i, shard in enumerate(together) if shard is not None]
            if not present:
                results += together
            else:
                self._empty()
                no_shards = [None] * (self.in_flight - len(together))
                results += work(self.decoder, [*together, *no_shards], self.buffers)[: len(together)]
                assert all(w.grad is None for w in self.buffers), "a gradient that missed its buffer"
                for buffer in (*self._small, *self._products):
                    buffer.zeroed(present)
            for i, shard in enumerate(together):
                if shard is not None and self._tied is not None:
                    self.buffers[self.decoder.w["embed"]].sums[i].add_(self._tied[i])
                self.tree.push(None if shard is None else self._leaves[i])
        return results

    def _empty(self) -> None:
        """Let every sum start from zero. The products' buffers are only marked: they are written over."""
        if self._small:
            torch._foreach_zero_([buffer.sums for buffer in self._small])
        for buffer in self._products:
            buffer.empty.update(range(self.in_flight))


def add_roots(roots: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Add the roots of neighbouring subtrees of equal size pairwise, in place: the tree's upper levels."""
    while len(roots) > 1:
        for left, right in zip(roots[::2], roots[1::2], strict=True):
            if left is not None and right is not None:
                left += right
        roots = [right if left is None else left for left, right in zip(roots[::2], roots[1::2], strict=True)]
    return roots[0]


def tree_reduce_scatter(
    group: dist.ProcessGroup, outgoing: torch.Tensor, lengths: Sequence[int], present: Sequence[bool]
) -> torch.Tensor | None:
    """The sum of what all ranks of a group have for this one: neighbours are added pairwise (add_roots).

    outgoing: this rank's parts for every rank, one after another; lengths: of each. present: which ranks have
    a root. A rank without one sends nothing; zeros in its place would change bits, because -0.0 + 0.0 is not
    -0.0. All ranks call this together. None where no rank has a root.
    """
    rank = dist.get_rank(group)
    n = lengths[rank]
    received = outgoing.new_empty(n * sum(present))
    sent = list(lengths) if present[rank] else [0] * len(present)
    sizes = [n * has for has in present]
    dist.all_to_all_single(received, outgoing[: sum(sent)], sizes, sent, group=group)
    parts = iter(received.split(n) if n else [received] * len(present))
    return add_roots([next(parts) if has else None for has in present])
