"""The gradient of a step: virtual shards as the leaves of one fixed binary tree.

All tensors here are flat over all weights (model/weights.py), [numel] fp32.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from ...model.decoder import Decoder

X = TypeVar("X")
Y = TypeVar("Y")


class GradientTree:
    """Adds the shards of a step as the leaves of a perfect binary tree.

    It works as a binary counter: level k holds the sum of 2^k consecutive shards until the next such sum
    arrives. It therefore holds at most log2(shards) partial sums.
    """

    def __init__(self, shards: int):
        self.shards = shards
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
        carry, owned, level = leaf, False, 0
        while level in self._levels:
            left = self._levels.pop(level)
            if left is not None and carry is not None:
                left += carry
                if owned:
                    self._spare.append(carry)
            if left is not None:
                carry, owned = left, True
            level += 1
        if carry is not None and not owned:
            buffer = self._spare.pop() if self._spare else torch.empty_like(carry)
            carry = buffer.copy_(carry)
        self._levels[level] = carry
        self.pushed += 1

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


class ShardSum:
    """The sum, by a tree, of the gradients of consecutive virtual shards, all computed with one decoder."""

    def __init__(self, decoder: Decoder, shards: int):
        self.decoder = decoder
        self.tree = GradientTree(shards)
        self._leaf = torch.empty(decoder.layout.numel, device=decoder.device)
        views = decoder.layout.views(self._leaf)
        for name, weight in decoder.w.items():
            weight.main_grad = views[name]
        # With tied embeddings lm_head has a gradient buffer of its own (see Decoder). It is added to the
        # embedding's gradient at the end of each shard.
        self._tied = (
            torch.zeros(decoder.lm_head.shape, device=decoder.device) if decoder.config.tied else None
        )
        if self._tied is not None:
            decoder.lm_head.main_grad = self._tied
        self._embed = views["embed"]

    def add(self, work: Callable[[Decoder, X], Y], shard: X | None) -> Y | None:
        """Run the next shard's backward passes by work(decoder, shard), and return what it returns.

        None is a shard without sequences.
        """
        if shard is None:
            self.tree.push(None)
            return None
        self._leaf.zero_()
        result = work(self.decoder, shard)
        if self._tied is not None:
            self._embed += self._tied
            self._tied.zero_()
        self.tree.push(self._leaf)
        return result


def add_roots(roots: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Add the roots of neighbouring subtrees of equal size pairwise, in place: the tree's upper levels."""
    while len(roots) > 1:
        for left, right in zip(roots[::2], roots[1::2], strict=True):
            if left is not None and right is not None:
                left += right
        roots = [right if left is None else left for left, right in zip(roots[::2], roots[1::2], strict=True)]
    return roots[0]
