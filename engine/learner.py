"""The learner: AdamW on fp32 master weights.

All tensors here are flat over all weights (model/weights.py). Elementwise work runs in slices of SLICE elements, to keep
temporaries small; it uses + - * / sqrt only, which round exactly, so slices and threads decide no bit.
"""

import math

import torch

from ..kernels.order import tree_sum
from ..model.decoder import Decoder
from ..model.weights import FLAT_TILE, Layout
from .config import OptimizerConfig

# Elements of one slice of an elementwise pass; a multiple of FLAT_TILE. Bounds temporaries to a few MiB, on a GPU, which waits for each
# launch, to some hundred.
SLICE, GPU_SLICE = 256 * FLAT_TILE, 8192 * FLAT_TILE


class GradientOverflowError(FloatingPointError):
    """A gradient is not finite; `weight` is the first one, in the layout's order, by its name in the checkpoint."""

    def __init__(self, weight: str, message: str):
        super().__init__(message)
        self.weight = weight


class Learner:
    """Owns the master weights and the optimizer state of a decoder.

    `master` [layout.numel] fp32. With an fp32 decoder the compute weights are the master weights themselves.
    """

    def __init__(self, decoder: Decoder, master: torch.Tensor, cfg: OptimizerConfig, total_updates: int):
        self.decoder, self.master, self.cfg, self.total_updates = decoder, master, cfg, total_updates
        self.layout: Layout = decoder.layout
        self.updates = 0
        self._slice = GPU_SLICE if master.is_cuda else SLICE
        self._m, self._v = torch.zeros_like(master), torch.zeros_like(master)
        self._decay = [(e.offset, e.offset + e.numel) for e in self.layout.entries.values() if len(e.shape) > 1]

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second moment, [layout.numel] fp32 each."""
        return self._m, self._v

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
        """One AdamW update from a gradient [layout.numel] fp32, None being zero. Returns grad_norm (before clipping) and lr.

        The gradient is that of the loss times `loss_scale`, a power of two, and is divided by it.
        Raises GradientOverflowError when the gradient is not finite; weights and state are then as before.
        """
        grad = torch.zeros_like(self.master) if grad is None else grad
        norm = self._norm(grad) / loss_scale
        if not math.isfinite(norm):
            name = self._first_not_finite(grad)
            raise GradientOverflowError(name, f"the gradient of {name} is not finite at update {self.updates}")
        clip = self.cfg.max_grad_norm / norm if 0 < self.cfg.max_grad_norm < norm else 1.0
        scale = clip / loss_scale  # the same significand as clip: one rounding of the gradient, whatever the loss scale
        lr = self.learning_rate()
        self.updates += 1
        self._decay_weights(lr)
        correction1, correction2 = 1.0 - self.cfg.beta1**self.updates, 1.0 - self.cfg.beta2**self.updates
        for a in range(0, grad.numel(), self._slice):
            at = slice(a, a + self._slice)
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
        for a in range(0, grad.numel(), self._slice):
            g = grad[a : a + self._slice].double().view(-1, FLAT_TILE)
            # On a GPU torch orders the sum of a row by the number of rows; a tree has one order.
            rows += (tree_sum(g * g, 1) if g.is_cuda else (g * g).sum(-1)).tolist()
        return math.sqrt(math.fsum(rows)) if all(map(math.isfinite, rows)) else math.nan

    def _first_not_finite(self, grad: torch.Tensor) -> str:
        return next(n for n, view in self.layout.checkpoint_views(grad).items() if not torch.isfinite(view).all())
