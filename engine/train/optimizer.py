"""The optimizer: AdamW on fp32 master weights.

All tensors here are flat over all weights (model/weights.py), or over a rank's slice of them (slices.py).
Elementwise work runs over SLICE elements at a time, to keep temporaries small; it uses + - * / sqrt only,
which round exactly, so slices and threads decide no bit.
"""

import math

import torch

from ...kernels.order import tree_sum
from ...model.decoder import Decoder
from ...model.weights import FLAT_TILE, Layout
from ...verify.ledger import Tree, hash_tree
from ..config import OptimizerConfig
from ..parallel.zero import Slices

# Elements of one slice of an elementwise pass; a multiple of FLAT_TILE. Temporaries of 1 MiB stay in the
# cache (benchmarks/LOG.md); a GPU, which waits for each launch, has some of a hundred.
SLICE, GPU_SLICE = 64 * FLAT_TILE, 8192 * FLAT_TILE


class GradientOverflowError(FloatingPointError):
    """A gradient is not finite; `weight` is the first one, in the layout's order, by its name in the
    checkpoint.
    """

    def __init__(self, weight: str, message: str):
        super().__init__(message)
        self.weight = weight


class Optimizer:
    """Owns the master weights and the optimizer state of a decoder, or one rank's slice of them (slices.py).

    `master` and the two `moments` are [own] fp32, own = layout.numel without ranks. With an fp32 decoder the
    compute weights are the master weights themselves (`in_place`).
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: torch.Tensor,
        cfg: OptimizerConfig,
        total_updates: int,
        slices: Slices | None = None,
    ):
        """weights: the first master weights, [layout.numel] fp32; not read where the decoder is fp32."""
        self.decoder, self.cfg, self.total_updates = decoder, cfg, total_updates
        self.layout: Layout = decoder.layout
        self.slices = slices or Slices(self.layout)
        self.in_place = decoder.dtype == torch.float32
        own = self.slices.own
        self.master = (
            decoder.flat.detach()[own] if self.in_place else weights[own].to(decoder.device, copy=True)
        )
        self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.updates = 0
        self._slice = GPU_SLICE if self.master.is_cuda else SLICE
        matrices = [e for e in self.layout.entries.values() if len(e.shape) > 1]
        inside = ((max(e.offset, own.start), min(e.offset + e.numel, own.stop)) for e in matrices)
        self._decay = [(a - own.start, b - own.start) for a, b in inside if a < b]

    @torch.no_grad()
    def load(self, weights: torch.Tensor) -> None:
        """Take other master weights, [layout.numel] fp32."""
        self.decoder.flat.detach().copy_(weights)
        if not self.in_place:
            self.master.copy_(weights[self.slices.own])

    def whole_master(self) -> torch.Tensor:
        """The master weights of all ranks, [layout.numel] fp32, which the next update may change.

        For all ranks at once.
        """
        return self.decoder.flat.detach() if self.in_place else self.slices.everywhere(self.master)

    def collect_master(self) -> torch.Tensor | None:
        """The master weights [layout.numel] fp32, in rank 0 at least; the next update may change them.

        For all ranks at once.
        """
        return self.decoder.flat.detach() if self.in_place else self.slices.collect(self.master)

    def hash_weights(self) -> Tree:
        """The hash tree of the master weights. For all ranks at once."""
        if self.in_place:  # of this rank's copy, so that ranks whose copies have parted are found out
            return hash_tree(self.layout.checkpoint_views(self.decoder.flat))
        return self.slices.hash_tree(self.slices.hashing(self.master))

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
    def update(self, grad: torch.Tensor | None, loss_scale: float = 1.0) -> dict[str, float]:
        """One AdamW update from a gradient [layout.numel] fp32, None being zero. Returns grad_norm (before
        clipping) and lr.

        With ranks, from this rank's part of the gradient (Slices.of_gradient), in all ranks at once.
        The gradient is that of the loss times `loss_scale`, a power of two, and is divided by it.
        Raises GradientOverflowError when the gradient is not finite; weights and state are then as before.
        """
        if grad is None:
            part = self.slices.of_gradient(self.slices.own)
            grad = self.master.new_zeros(part.stop - part.start)
        norm = self._norm(grad) / loss_scale
        if not math.isfinite(norm):
            name = self._first_not_finite(grad)
            raise GradientOverflowError(
                name, f"the gradient of {name} is not finite at update {self.updates}"
            )
        clip = self.cfg.max_grad_norm / norm if 0 < self.cfg.max_grad_norm < norm else 1.0
        scale = (
            clip / loss_scale
        )  # the same significand as clip: one rounding of the gradient, whatever the loss scale
        lr = self.learning_rate()
        self.updates += 1
        self._decay_weights(lr)
        correction1, correction2 = 1.0 - self.cfg.beta1**self.updates, 1.0 - self.cfg.beta2**self.updates
        first, second = self.moments
        for a in range(0, self.master.numel(), self._slice):
            at = slice(a, min(a + self._slice, self.master.numel()))
            g, m, v = grad[at] * scale, first[at], second[at]
            m.mul_(self.cfg.beta1).add_(g * (1.0 - self.cfg.beta1))
            v.mul_(self.cfg.beta2).add_(g * g * (1.0 - self.cfg.beta2))
            step = (m / correction1).div_((v / correction2).sqrt_().add_(self.cfg.eps)).mul_(lr)
            self.master[at].sub_(step)
        if not self.in_place:
            self.decoder.flat[self.slices.own] = self.master  # rounds once to the compute dtype
        self.slices.share(self.decoder.flat)
        return {"grad_norm": norm, "lr": lr}

    def _decay_weights(self, lr: float) -> None:
        if self.cfg.weight_decay:
            for a, b in self._decay:
                self.master[a:b].mul_(1.0 - lr * self.cfg.weight_decay)

    def _norm(self, grad: torch.Tensor) -> float:
        """The global norm:

        squares summed in fp64 along rows of FLAT_TILE, the rows by a correctly rounded sum.
        """
        mine = []
        for a in range(
            -self.slices.own.start % FLAT_TILE, grad.numel(), self._slice
        ):  # rows that begin in this rank's slice
            g = grad[a : a + self._slice].double().view(-1, FLAT_TILE)
            # On a GPU torch orders the sum of a row by the number of rows; a tree has one order.
            mine.append((tree_sum(g * g, 1) if g.is_cuda else (g * g).sum(-1)).cpu().numpy())
        rows = [
            row for part in self.slices.ranks.gather(lambda: mine) for some in part for row in some.tolist()
        ]
        return math.sqrt(math.fsum(rows)) if all(map(math.isfinite, rows)) else math.nan

    def _first_not_finite(self, grad: torch.Tensor) -> str:
        mine = (
            name for name, start, stop in self.slices.blocks if not torch.isfinite(grad[start:stop]).all()
        )
        found = self.slices.ranks.gather(lambda: next(mine, None))
        return next(filter(None, found))
