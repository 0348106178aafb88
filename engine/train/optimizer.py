"""The optimizer: AdamW on fp32 master weights.

All tensors here are flat over the weights that are trained (model/weights.py), or over a rank's slice of
them (parallel/zero.py). Frozen weights have no state: they are kept as they were given. Elementwise work runs
over SLICE elements at a time, to keep temporaries small. Its operations are those of kernels/order.py, so
slices and threads decide no bit.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from ...kernels.adamw import AdamW, adamw
from ...kernels.order import tree_sum
from ...model.compute_weights import quantise_all
from ...model.decoder import Decoder
from ...model.quantisation import Quantisation
from ...model.weights import FLAT_TILE, VALUE_HEAD, FlatLayout
from ...verify.ledger import Tree
from ..config.run_config import OptimizerConfig
from .parallel.tree_hash import hash_tree
from .parallel.zero import Slices

# Elements of one slice of an elementwise pass; a multiple of FLAT_TILE. On a CPU a temporary has 1 MiB and so
# stays in the cache (benchmarks/LOG.md). On a GPU it has 128 MiB, because a GPU waits for each launch.
SLICE, GPU_SLICE = 64 * FLAT_TILE, 8192 * FLAT_TILE


class GradientOverflowError(FloatingPointError):
    """A gradient is not finite.

    weight: the first weight with such a gradient, in the layout's order, by its name in the checkpoint.
    """

    def __init__(self, weight: str, message: str):
        super().__init__(message)
        self.weight = weight


class Optimizer:
    """Owns the master weights and the optimizer state of a decoder, or one rank's slice of both.

    `master` and the two `moments` are [own] fp32: the rank's slice. Without ranks it is all that is trained.
    adapter_optimizer.py has the case in which adapters are trained in place of the weights.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: torch.Tensor,
        cfg: OptimizerConfig,
        total_updates: int,
        slices: Slices | None = None,
        quantisation: Quantisation | None = None,
    ):
        """weights: the first master weights, [layout.numel] fp32. They are not read if `in_place`.

        total_updates: of the whole run, for the schedule of the learning rate. quantisation: of the weights
        that the decoder computes with, from now on; None leaves them as they are.
        """
        self.decoder, self.cfg, self.total_updates = decoder, cfg, total_updates
        self._quantisation = quantisation
        self.slices = slices or Slices(self.layout)
        place = self.slices.own
        self.master = self._flat[place] if self.in_place else weights[place].to(decoder.device, copy=True)
        self._keep_frozen(weights)
        self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.updates = 0
        self._slice = GPU_SLICE if self.master.is_cuda else SLICE
        matrices = [e for e in self.layout.trained if len(e.shape) > 1]
        overlaps = ((max(e.offset, place.start), min(e.offset + e.numel, place.stop)) for e in matrices)
        # The parts of `master` that belong to matrices.
        self._decayed = [slice(a - place.start, b - place.start) for a, b in overlaps if a < b]
        heads = [e.offset for e in self.layout.trained if e.name == VALUE_HEAD]
        head = min(max(heads[0] - place.start, 0), len(self.master)) if heads else len(self.master)
        # The parts of `master`, each with its share of the learning rate. A critic's head is the last weight.
        parts = (slice(0, head), 1.0), (slice(head, len(self.master)), cfg.critic_lr_ratio)
        self._rates = [(part, ratio) for part, ratio in parts if part.start < part.stop]
        self._quantise(self.layout.checkpoint_views)

    @property
    def layout(self) -> FlatLayout:
        """Of all that is trained."""
        return self.decoder.layout

    @property
    def in_place(self) -> bool:
        """Whether the master weights lie in `_flat` itself.

        Those of an fp32 decoder are its weights, unless these are quantised.
        """
        return self.decoder.dtype == torch.float32 and self._quantisation is None

    @property
    def _flat(self) -> torch.Tensor:
        """What the master weights give, whole in every rank, [layout.numel]: the compute weights."""
        return self.decoder.flat.detach()

    @torch.no_grad()
    def load(self, weights: torch.Tensor, updates: int) -> None:
        """Replace the master weights by `weights` [layout.numel] fp32, and the compute weights with them.

        updates: the number of updates that these weights have had.
        """
        self.updates = updates
        self._flat.copy_(weights)
        if not self.in_place:
            self.master.copy_(weights[self.slices.own])
            self._keep_frozen(weights)
        self._quantise(self.layout.checkpoint_views)

    @torch.no_grad()
    def _quantise(self, views: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> None:
        """Quantise compute weights that were just rounded from the master weights, whole in every rank.

        views: gives those of a flat tensor by their names in a checkpoint.
        """
        if self._quantisation is not None:
            quantise_all(views(self._flat), self._quantisation)

    def whole_master(self) -> torch.Tensor:
        """The master weights of all ranks, [layout.numel] fp32. The next update may change this tensor.

        All ranks must call this together.
        """
        if self.in_place:
            return self._flat
        return self._with_frozen(self.slices.everywhere(self.master))

    def whole_model(self) -> torch.Tensor:
        """The model of the master weights, [decoder.layout.numel] fp32; see `whole_master`."""
        return self.whole_master()

    def collect_master(self) -> torch.Tensor | None:
        """The master weights of all ranks, [layout.numel] fp32, at least in rank 0; see `whole_master`.

        All ranks must call this together. Ranks other than 0 may get None.
        """
        if self.in_place:
            return self._flat
        trained = self.slices.collect(self.master)
        return None if trained is None else self._with_frozen(trained)

    def _keep_frozen(self, weights: torch.Tensor) -> None:
        """Keep the frozen part of `weights` in fp32, on the host: nothing computes with it."""
        self._frozen = None if self.in_place else weights[self.layout.trained_numel :].to("cpu", copy=True)

    @property
    def _frozen_part(self) -> torch.Tensor:
        """The weights that are not trained, [layout.numel - layout.trained_numel] fp32."""
        return self._flat[self.layout.trained_numel :] if self.in_place else self._frozen

    def frozen_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in the checkpoint and the fp32 values of each weight that is not trained."""
        yield from self.layout.frozen_views(self._frozen_part).items()

    def _with_frozen(self, trained: torch.Tensor) -> torch.Tensor:
        """The trained weights with the frozen ones after them, [layout.numel]."""
        frozen = self._frozen_part
        return torch.cat([trained, frozen.to(trained.device)]) if len(frozen) else trained

    def hash_weights(self) -> Tree:
        """The hash tree of the trained master weights. All ranks must call this together."""
        if self.in_place:  # the hash is of this rank's copy, so that ranks with different copies are found
            return hash_tree(self.layout.blocks, self._flat)
        return self.slices.hash_tree(self.slices.hashing(self.master))

    def hash_moments(self) -> Tree:
        """The hash tree of the moments. All ranks must call this together."""
        return self.slices.hash_tree(self.slices.hashing(*self.moments))

    def collect_moments(self) -> list[torch.Tensor | None]:
        """The moments of all ranks, [layout.trained_numel] fp32 each, in rank 0; see collect_master."""
        return [self.slices.collect(moment) for moment in self.moments]

    @torch.no_grad()
    def load_moments(self, moments: Sequence[torch.Tensor]) -> None:
        """Replace the moments. moments: this rank's slice of each."""
        for moment, loaded in zip(self.moments, moments, strict=True):
            moment.copy_(loaded)

    def whole_policy(self) -> AbstractContextManager[None]:
        """Inside this context the decoder has all its weights. All ranks must enter it together."""
        return nullcontext()

    def hash_compute_weights(self) -> Tree | None:
        """The hash tree of this rank's compute weights; None where they are the master weights."""
        return None if self.in_place else hash_tree(self.layout.blocks, self._flat)

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        c = self.cfg
        if self.updates < c.warmup_steps:
            return c.lr * (self.updates + 1) / c.warmup_steps
        if c.schedule == "constant":
            return c.lr
        progress = (self.updates - c.warmup_steps) / max(1, self.total_updates - c.warmup_steps)
        shape = 1.0 - progress if c.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return c.lr * (c.min_lr_ratio + (1.0 - c.min_lr_ratio) * shape)

    @torch.no_grad()
    def update(self, grad: torch.Tensor | None, loss_scale: float = 1.0) -> dict[str, float]:
        """One AdamW update. Returns grad_norm (before clipping) and lr.

        grad: the gradient of the loss times `loss_scale`, [layout.trained_numel] fp32; None is zero. With
        ranks it is this rank's part (Slices.of_gradient), and all ranks must call this together.
        loss_scale: a power of two; the gradient is divided by it.

        Raises GradientOverflowError when the gradient is not finite. Weights and state are then unchanged.
        """
        if grad is None:
            part = self.slices.of_gradient(self.slices.own)
            grad = torch.zeros(part.stop - part.start, device=self.decoder.device)
        norm = self._norm(grad) / loss_scale
        if not math.isfinite(norm):
            name = self._first_not_finite(grad)
            message = f"the gradient of {name} is not finite at update {self.updates}"
            raise GradientOverflowError(name, message)
        clip = self.cfg.max_grad_norm / norm if 0 < self.cfg.max_grad_norm < norm else 1.0
        lr = self.learning_rate()
        self.updates += 1
        if self.cfg.weight_decay:
            self._decay(1.0 - lr * self.cfg.weight_decay)
        # clip / loss_scale has the significand of clip, so the loss scale adds no rounding of the gradient.
        self._adamw(grad, self._numbers(clip / loss_scale, lr))
        return {"grad_norm": norm, "lr": lr}

    def _numbers(self, grad_scale: float, lr: float) -> AdamW:
        """Of this update, for the gradient times `grad_scale`."""
        c = self.cfg
        corrections = 1.0 - c.beta1**self.updates, 1.0 - c.beta2**self.updates
        return AdamW(grad_scale, lr, c.beta1, c.beta2, *corrections, c.eps)

    def _decay(self, factor: float) -> None:
        """Multiply the master weights of matrices."""
        for part in self._decayed:
            self.master[part].mul_(factor)

    def _adamw(self, grad: torch.Tensor, numbers: AdamW) -> None:
        """Update moments, master weights and compute weights, in all ranks."""
        out = None if self.in_place else self._flat[self.slices.own]
        for part, ratio in self._rates:
            moments = (moment[part] for moment in self.moments)
            part_numbers = numbers._replace(lr=numbers.lr * ratio)
            adamw(self.master[part], *moments, grad[part], part_numbers, None if out is None else out[part])
        self.slices.share(self._flat)
        self._quantise(self.layout.trained_views)

    def _norm(self, grad: torch.Tensor) -> float:
        """The global norm of all ranks' gradients.

        Squares are summed in fp64 along rows of FLAT_TILE. The rows are added by a correctly rounded sum.
        """
        row_sums = [grad.new_empty(0, dtype=torch.float64)]
        # The first row is the first that begins in this rank's slice.
        for start in range(-self.slices.own.start % FLAT_TILE, grad.numel(), self._slice):
            g = grad[start : start + self._slice].double().view(-1, FLAT_TILE)
            # On a GPU torch's order of a row's sum depends on the number of rows. A tree has one order.
            row_sums.append(tree_sum(g * g, 1) if g.is_cuda else (g * g).sum(-1))
        own_rows = torch.cat(row_sums).cpu().numpy()  # the only wait for a GPU
        rows = np.concatenate(self.slices.ranks.gather(lambda: own_rows))
        return math.sqrt(math.fsum(rows.tolist())) if np.isfinite(rows).all() else math.nan

    def _first_not_finite(self, grad: torch.Tensor) -> str:
        """The name of the first weight, over all ranks, whose gradient is not finite."""
        blocks = self.slices.blocks
        names = (name for name, start, stop in blocks if not torch.isfinite(grad[start:stop]).all())
        first_of_ranks = self.slices.ranks.gather(lambda: next(names, None))
        return next(filter(None, first_of_ranks))
