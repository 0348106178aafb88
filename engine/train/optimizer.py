"""The optimizer: AdamW on fp32 master weights.

The weights come in the pieces that a rank has (master_weights.py). The gradient is flat over what is trained
(model/weights.py), or over a rank's slice of it (parallel/zero.py). Frozen weights have no state: they are
kept as they were given. Elementwise work runs over SLICE elements at a time, to keep temporaries small. Its
operations are those of kernels/order.py, so pieces, slices and threads decide no bit.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...files.bitwise import unequal
from ...kernels.adamw import AdamW, adamw
from ...kernels.order import tree_sum
from ...model.checkpoint import DTYPES
from ...model.weights import FLAT_TILE, FlatLayout
from ...verify.ledger import Tree
from ..config.run_config import OptimizerConfig
from .master_weights import MasterWeights, Piece, overlaps
from .parallel.zero import Slices
from .schedule import learning_rate

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
    """AdamW on the master weights of this rank, with their moments: [weights.numel] each, as kept."""

    def __init__(self, weights: MasterWeights, cfg: OptimizerConfig, total_updates: int):
        """total_updates: of the whole run, for the schedule of the learning rate."""
        self.weights, self.cfg, self.total_updates = weights, cfg, total_updates
        self._device = device = weights.decoder.device
        offload = weights.decoder.offload
        kept = DTYPES[cfg.moments]
        self.moments = tuple(offload.empty(weights.numel, device, kept).zero_() for _ in range(2))
        self.updates, self._slice = 0, GPU_SLICE if device.type == "cuda" else SLICE

    @property
    def slices(self) -> Slices:
        """Of what is trained, over the ranks."""
        return self.weights.slices

    @property
    def layout(self) -> FlatLayout:
        """Of all that is trained."""
        return self.weights.layout

    def hash_moments(self) -> Tree:
        """The hash tree of the moments. All ranks must call this together."""
        return self.slices.hash_tree(self.slices.hashing(*map(self._to_slice, self.moments)))

    def collect_moments(self) -> list[torch.Tensor | None]:
        """The moments of all ranks, [layout.trained_numel] fp32 each, in rank 0. A call of all ranks."""
        return [self.slices.collect(self._to_slice(moment)) for moment in self.moments]

    def _to_slice(self, moment: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a moment in fp32, which holds what is kept exactly."""
        return self.weights.to_slice(moment.float())

    @torch.no_grad()
    def load_moments(self, moments: Sequence[torch.Tensor], updates: int) -> None:
        """Replace the moments, as they were after so many updates. moments: this rank's slice of each."""
        self.updates = updates
        for moment, loaded in zip(self.moments, moments, strict=True):
            moment.copy_(self.weights.from_slice(loaded))

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return learning_rate(self.cfg, self.updates, self.total_updates)

    @torch.no_grad()
    def update(self, grad: torch.Tensor | None, loss_scale: float = 1.0) -> dict[str, float]:
        """One AdamW update. Returns grad_norm (before clipping), lr and update/moved (docs/metrics.md).

        grad: the gradient of the loss times `loss_scale`, [layout.trained_numel] fp32; None is zero. With
        ranks it is this rank's part (Slices.of_gradient), and all ranks must call this together.
        loss_scale: a power of two; the gradient is divided by it.

        Raises GradientOverflowError when the gradient is not finite. Weights and state are then unchanged.
        """
        if grad is None:
            part = self.slices.of_gradient(self.slices.own)
            grad = torch.zeros(part.stop - part.start, device=self._device)
        norm = self._norm(grad) / loss_scale
        if not math.isfinite(norm):
            name = self._first_not_finite(grad)
            message = f"the gradient of {name} is not finite at update {self.updates}"
            raise GradientOverflowError(name, message)
        clip = self.cfg.max_grad_norm / norm if 0 < self.cfg.max_grad_norm < norm else 1.0
        lr = self.learning_rate()
        self.updates += 1
        # clip / loss_scale has the significand of clip, so the loss scale adds no rounding of the gradient.
        moved = self._adamw(grad, self._numbers(clip / loss_scale, lr))
        return {"grad_norm": norm, "lr": lr, "update/moved": moved}

    def _numbers(self, grad_scale: float, lr: float) -> AdamW:
        """Of this update, for the gradient times `grad_scale`."""
        c = self.cfg
        corrections = 1.0 - c.beta1**self.updates, 1.0 - c.beta2**self.updates
        return AdamW(grad_scale, lr, c.beta1, c.beta2, *corrections, c.eps)

    def _adamw(self, grad: torch.Tensor, numbers: AdamW) -> float:
        """Update moments, master weights and compute weights, in all ranks.

        Returns the share of the weights of what is trained that compute with other bits than before.
        """
        rank_grad, critic_lr = self.weights.from_slice(grad), numbers.lr * self.cfg.critic_lr_ratio
        decay = 1.0 - numbers.lr * self.cfg.weight_decay
        moved: list[torch.Tensor] = []
        for piece in self.weights.pieces():
            piece_numbers = numbers._replace(lr=critic_lr) if piece.is_critic_head else numbers
            moved_here = list(self._update_piece(piece, rank_grad[piece.place], piece_numbers, decay))
            moved += [] if piece.is_copy else moved_here
        n = self.weights.changed()
        if n is None:
            n = sum(self.slices.ranks.gather(lambda: int(sum(moved))))
        return n / self.weights.computed_numel

    def _update_piece(
        self, piece: Piece, grad: torch.Tensor, numbers: AdamW, decay: float
    ) -> Iterator[torch.Tensor]:
        """AdamW of a piece by slices, which come to the device where its state lies beside it.

        Yields how many elements have other bits than before once they are rounded to the compute dtype.
        """
        offload, device, dtype = self.weights.decoder.offload, self._device, self.weights.compute_dtype
        moments = [moment[piece.place] for moment in self.moments]
        for part in offload.slices(len(piece.weights), self._slice):
            rounded = None if piece.rounded is None else piece.rounded[part]
            with (
                piece.offload.brought(device, piece.weights[part]) as (weights,),
                offload.brought(device, *(moment[part] for moment in moments)) as state,
            ):
                before = weights.to(dtype, copy=True)
                for matrix in overlaps(piece.matrices, part) if decay != 1.0 else ():
                    weights[matrix].mul_(decay)
                wide = [moment.float() for moment in state]  # themselves, where they are kept in fp32
                adamw(weights, *wide, grad[part].to(device), numbers, rounded)
                for moment, new in zip(state, wide, strict=True):
                    if new is not moment:
                        moment.copy_(new)
                yield unequal(before, weights.to(dtype)).sum()

    def _norm(self, grad: torch.Tensor) -> float:
        """The global norm of all ranks' gradients.

        Squares are summed in fp64 along rows of FLAT_TILE. The rows are added by a correctly rounded sum.
        """
        row_sums = [torch.empty(0, dtype=torch.float64, device=self._device)]
        # The first row is the first that begins in this rank's slice.
        for start in range(-self.slices.own.start % FLAT_TILE, grad.numel(), self._slice):
            g = grad[start : start + self._slice].to(self._device).double().view(-1, FLAT_TILE)
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
