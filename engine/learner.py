"""The learner: gradients of virtual shards summed by a fixed binary tree, and AdamW on fp32 master weights.

All tensors here are flat over all weights (model/weights.py). Elementwise work runs in slices of SLICE elements, to keep
temporaries small; it uses + - * / sqrt only, which round exactly, so slices and threads decide no bit.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..model.decoder import Decoder
from ..model.weights import FLAT_TILE, Layout
from .config import OptimizerConfig
from .workers import Workers

X = TypeVar("X", bound=Sequence)
Y = TypeVar("Y")

# Elements of one slice of an elementwise pass; a multiple of FLAT_TILE. Bounds temporaries to a few MiB.
SLICE = 256 * FLAT_TILE


class GradientTree:
    """Adds the shards of a step as the leaves of a perfect binary tree, holding log2(shards) partial sums at most.

    Works as a binary counter: level k holds the sum of 2^k consecutive shards, until its neighbour arrives.
    """

    def __init__(self, shards: int, numel: int):
        self.shards, self.numel = shards, numel
        self._levels: dict[int, torch.Tensor | None] = {}
        self._spare: list[torch.Tensor] = []
        self.pushed = 0

    def push(self, leaf: torch.Tensor | None) -> None:
        """Add the next shard's gradient [numel]; None for a shard without sequences. `leaf` may be reused afterwards."""
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
            buffer = self._spare.pop() if self._spare else torch.empty(self.numel)
            carry = buffer.copy_(carry)
        self._levels[level] = carry
        self.pushed += 1

    def take(self) -> torch.Tensor:
        """The root, once every shard was pushed. The tree is then empty; the root is valid until the next push."""
        assert self.pushed == self.shards, f"{self.pushed} of {self.shards} shards were pushed"
        (root,) = self._levels.values()
        self._levels, self.pushed = {}, 0
        if root is None:
            return torch.zeros(self.numel)
        self._spare.append(root)
        return root


class Lane:
    """One shard's gradient in the making: a decoder to run the backward through and the buffers it adds to."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.leaf = torch.zeros(decoder.layout.numel)
        views = decoder.layout.views(self.leaf)
        for name, weight in decoder.w.items():
            weight.main_grad = views[name]
        # The head of tied embeddings has a buffer of its own (see Decoder); it joins the embedding's at a shard's end.
        self._tied = torch.zeros(decoder.head.shape) if decoder.config.tied else None
        if self._tied is not None:
            decoder.head.main_grad = self._tied
        self._embed = views["embed"]

    def finish(self) -> torch.Tensor:
        """The shard's gradient, once its backward passes are done."""
        if self._tied is not None:
            self._embed += self._tied
            self._tied.zero_()
        return self.leaf


class Learner:
    """Owns the master weights, the optimizer state and the gradients of a decoder.

    `master` [layout.numel] fp32. With an fp32 decoder the compute weights are the master weights themselves. Each of the
    `lanes` holds a gradient, so that as many shards can be in the making at once.
    """

    def __init__(self, decoder: Decoder, master: torch.Tensor, cfg: OptimizerConfig, shards: int, total_updates: int, lanes: int = 1):
        self.decoder, self.master, self.cfg, self.total_updates = decoder, master, cfg, total_updates
        self.layout: Layout = decoder.layout
        self.updates = 0
        self._m, self._v = torch.zeros_like(master), torch.zeros_like(master)
        self._tree = GradientTree(shards, self.layout.numel)
        self.lanes = [Lane(decoder if i == 0 else decoder.twin()) for i in range(lanes)]
        self._decay = [(e.offset, e.offset + e.numel) for e in self.layout.entries.values() if len(e.shape) > 1]

    def close_shard(self, lane: int = 0, empty: bool = False) -> None:
        """The backward passes of the next virtual shard are done, in that lane: hand its gradient to the tree."""
        if empty:
            self._tree.push(None)
            return
        leaf = self.lanes[lane].finish()
        self._tree.push(leaf)
        leaf.zero_()

    def sum_shards(self, shards: Sequence[X], work: Callable[[Decoder, X], Y], workers: Workers) -> list[Y]:
        """work(decoder, shard) for each shard, a lane each, as many at once as there are workers; then `close_shard` in order.

        Returns the results in order. An empty shard has no gradient, but a place in the tree. After an exception in `work` the
        gradient is incomplete, and the learner must not be used again.
        """
        results, at_once = [], min(workers.n, len(self.lanes))
        for start in range(0, len(shards), at_once):
            some = list(enumerate(shards[start : start + at_once]))
            results += workers.map(lambda item: work(self.lanes[item[0]].decoder, item[1]), some)
            for lane, shard in some:
                self.close_shard(lane, empty=not len(shard))
        return results

    def take_gradient(self) -> torch.Tensor:
        """The sum of all shards, [layout.numel] fp32; valid until the next shard is closed."""
        return self._tree.take()

    def learning_rate(self) -> float:
        """The rate of the next update."""
        c, done = self.cfg, self.updates
        if done < c.warmup_steps:
            return c.lr * (done + 1) / c.warmup_steps
        if c.schedule == "constant":
            return c.lr
        progress = (done - c.warmup_steps) / max(1, self.total_updates - c.warmup_steps)
        shape = 1.0 - progress if c.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return c.lr * (c.min_lr_ratio + (1.0 - c.min_lr_ratio) * shape)

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """One AdamW update from the sum of all shards. Returns grad_norm (before clipping) and lr.

        Raises FloatingPointError when the gradient is not finite; weights and state are then as before.
        """
        grad = self.take_gradient()
        norm = self._norm(grad)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of {self._first_not_finite(grad)} is not finite at update {self.updates}")
        scale = self.cfg.max_grad_norm / norm if 0 < self.cfg.max_grad_norm < norm else 1.0
        lr = self.learning_rate()
        self.updates += 1
        self._decay_weights(lr)
        correction1, correction2 = 1.0 - self.cfg.beta1**self.updates, 1.0 - self.cfg.beta2**self.updates
        for a in range(0, grad.numel(), SLICE):
            at = slice(a, a + SLICE)
            g, m, v = grad[at] * scale, self._m[at], self._v[at]
            m.mul_(self.cfg.beta1).add_(g * (1.0 - self.cfg.beta1))
            v.mul_(self.cfg.beta2).add_(g * g * (1.0 - self.cfg.beta2))
            step = (m / correction1).div_((v / correction2).sqrt_().add_(self.cfg.eps)).mul_(lr)
            self.master[at].sub_(step)
        if self.decoder.flat.data_ptr() != self.master.data_ptr():
            self.decoder.flat.copy_(self.master)  # rounds once to the compute dtype
        return {"grad_norm": norm, "lr": lr}

    def _decay_weights(self, lr: float) -> None:
        if self.cfg.weight_decay:
            for a, b in self._decay:
                self.master[a:b].mul_(1.0 - lr * self.cfg.weight_decay)

    def _norm(self, grad: torch.Tensor) -> float:
        """The global norm: squares summed in fp64 along rows of FLAT_TILE, the rows by a correctly rounded sum."""
        rows = []
        for a in range(0, grad.numel(), SLICE):
            g = grad[a : a + SLICE].double().view(-1, FLAT_TILE)
            rows += (g * g).sum(-1).tolist()
        return math.sqrt(math.fsum(rows)) if all(map(math.isfinite, rows)) else math.nan

    def _first_not_finite(self, grad: torch.Tensor) -> str:
        return next(n for n, view in self.layout.checkpoint_views(grad).items() if not torch.isfinite(view).all())
