"""The optimizer: AdamW on fp32 master weights, or Muon on matrices and AdamW on the rest (muon.py).

The weights come in the pieces that a rank has (master_weights.py). The gradient is flat over what is trained
(model/weights.py), or over a rank's slice of it (parallel/zero.py). Frozen weights have no state: they are
kept as they were given. Elementwise work runs over SLICE elements at a time, to keep temporaries small. Its
operations are those of kernels/order.py, so pieces, slices and threads decide no bit.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch

from ...files.bitwise import unequal
from ...kernels.adamw import AdamW, adamw
from ...kernels.order import tree_sum
from ...model.weights import FLAT_TILE, FlatLayout
from ...verify.ledger import Tree
from ..config.run_config import OptimizerConfig
from .master_weights import MasterWeights, Piece, in_place, overlaps
from .moments import CodedMoment, Moment
from .muon import rounds
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
    """AdamW, or Muon, on the master weights of this rank."""

    def __init__(self, weights: MasterWeights, cfg: OptimizerConfig, total_updates: int):
        """total_updates: of the whole run, for the schedule of the learning rate."""
        self.weights, self.cfg, self.total_updates = weights, cfg, total_updates
        self._device = device = weights.decoder.device
        self.updates, self._slice = 0, GPU_SLICE if device.type == "cuda" else SLICE
        self._rounds = rounds(weights.layout, weights.spread) if cfg.name == "muon" else []
        muon = sorted((place for r in self._rounds for place in r.places), key=lambda place: place.start)
        # Of this rank's vector, what AdamW updates; the first moment of Muon's matrices is their momentum.
        ends = [place.stop for place in muon], [place.start for place in muon]
        self._adamw_ranges = list(map(slice, [0, *ends[0]], [*ends[1], weights.numel]))
        first_ranges = [slice(0, weights.numel)]
        if cfg.moments == "int8":
            first_ranges = self._adamw_ranges = self._tensors()
        self._first, self._second = self._moment(first_ranges, True), self._moment(self._adamw_ranges, False)

    @property
    def slices(self) -> Slices:
        """Of what is trained, over the ranks."""
        return self.weights.slices

    @property
    def layout(self) -> FlatLayout:
        """Of all that is trained."""
        return self.weights.layout

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second moment, [weights.numel] fp32; 0 where there is none."""
        return self._first.wide, self._second.wide

    def _moment(self, ranges: list[slice], signed: bool) -> Moment:
        where = self.weights.numel, ranges, self.weights.decoder.offload, self._device
        kept = self.cfg.moments
        return CodedMoment(*where, signed) if kept == "int8" else Moment(kept, *where)

    def _tensors(self) -> list[slice]:
        """What this rank has of each tensor of the checkpoint, which begins at a block of the ledger."""
        by_name = (list(blocks) for _, blocks in groupby(self.slices.blocks, lambda block: block.name))
        return [slice(blocks[0].start, blocks[-1].stop) for blocks in by_name]

    def hash_moments(self) -> Tree:
        """The hash tree of the moments. All ranks must call this together."""
        return self.slices.hash_tree(self.slices.hashing(*map(self.weights.to_slice, self.moments)))

    def collect_moments(self) -> list[torch.Tensor | None]:
        """The moments of all ranks, [layout.trained_numel] fp32 each, in rank 0. A call of all ranks."""
        return [self.slices.collect(self.weights.to_slice(moment)) for moment in self.moments]

    @torch.no_grad()
    def load_moments(self, moments: Sequence[torch.Tensor], updates: int) -> None:
        """Replace the moments, as they were after so many updates. moments: this rank's slice of each."""
        self.updates = updates
        for moment, loaded in zip((self._first, self._second), moments, strict=True):
            moment.load(self.weights.from_slice(loaded))

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return learning_rate(self.cfg, self.updates, self.total_updates)

    @torch.no_grad()
    def update(self, grad: torch.Tensor | None, loss_scale: float = 1.0) -> dict[str, float]:
        """One update. Returns grad_norm (before clipping), lr and update/moved (docs/metrics.md).

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
        moved = self._change(grad, self._numbers(clip / loss_scale, lr))
        return {"grad_norm": norm, "lr": lr, "update/moved": moved}

    def _numbers(self, grad_scale: float, lr: float) -> AdamW:
        """Of this update, for the gradient times `grad_scale`."""
        c = self.cfg
        corrections = 1.0 - c.beta1**self.updates, 1.0 - c.beta2**self.updates
        return AdamW(grad_scale, lr, c.beta1, c.beta2, *corrections, c.eps)

    def _change(self, grad: torch.Tensor, numbers: AdamW) -> float:
        """Update moments, master weights and compute weights, in all ranks.

        Returns the share of the weights of what is trained that compute with other bits than before.
        """
        rank_grad, pieces = self.weights.from_slice(grad), list(self.weights.pieces())
        moved: list[torch.Tensor] = []
        if self._rounds:
            self._muon(pieces, rank_grad, numbers, moved)
        for piece in pieces:
            self._adamw(piece, rank_grad, numbers, moved)
        n = self.weights.changed()
        if n is None:
            n = sum(self.slices.ranks.gather(lambda: int(sum(moved))))
        return n / self.weights.computed_numel

    def _adamw(self, piece: Piece, grad: torch.Tensor, numbers: AdamW, moved: list[torch.Tensor]) -> None:
        """AdamW of what of a piece is not Muon's. grad: at least [weights.numel]. moved: see _changing."""
        decay = 1.0 - numbers.lr * self.cfg.weight_decay
        if piece.is_critic_head:
            numbers = numbers._replace(lr=numbers.lr * self.cfg.critic_lr_ratio)
        for _, place in in_place(self._adamw_ranges, piece.place):
            for part in self._slices(place):
                with (
                    self._changing(piece, part, moved) as (weights, rounded),
                    self._first.brought(part) as first,
                    self._second.brought(part) as second,
                ):
                    for matrix in overlaps(piece.matrices, piece.within(part)) if decay != 1.0 else ():
                        weights[matrix].mul_(decay)
                    adamw(weights, first, second, grad[part].to(self._device), numbers, rounded)

    def _muon(
        self, pieces: Sequence[Piece], grad: torch.Tensor, numbers: AdamW, moved: list[torch.Tensor]
    ) -> None:
        """Muon of its matrices, of which the pieces have parts; as _adamw. A call of all ranks."""
        c, lr, places = self.cfg, numbers.lr * self.cfg.muon_lr_ratio, [piece.place for piece in pieces]
        decay = 1.0 - lr * c.weight_decay
        for matrices in self._rounds:
            parts = [grad[:0].to(self._device)]  # a rank may have none
            parts += [self._direction(place, grad, numbers.grad_scale) for place in matrices.places]
            steps = matrices.steps(torch.cat(parts), c.ns_steps, lr, c.adjust_lr)
            for place, step in zip(matrices.places, steps.split(list(map(len, parts[1:]))), strict=True):
                for i, common in in_place(places, place):
                    for part in self._slices(common):
                        with self._changing(pieces[i], part, moved) as (weights, rounded):
                            if decay != 1.0:
                                weights.mul_(decay)
                            weights.sub_(step[part.start - place.start : part.stop - place.start])
                            if rounded is not None:
                                rounded.copy_(weights)

    def _direction(self, place: slice, grad: torch.Tensor, grad_scale: float) -> torch.Tensor:
        """What Muon orthogonalises, of a part of a matrix, once its momentum has the gradient."""
        mu, directions = self.cfg.momentum, []
        for part in self._slices(place):
            with self._first.brought(part) as momentum:
                g = grad[part].to(self._device) * grad_scale * (1.0 - mu)
                momentum.mul_(mu).add_(g)
                directions.append(g + momentum * mu if self.cfg.nesterov else momentum)
        return torch.cat(directions)

    def _slices(self, place: slice) -> Iterator[slice]:
        """The parts of a place that are on the device at once."""
        for part in self.weights.decoder.offload.slices(place.stop - place.start, self._slice):
            yield slice(place.start + part.start, place.start + part.stop)

    @contextmanager
    def _changing(
        self, piece: Piece, part: slice, moved: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """A part of a piece on the device, which is changed inside this context; and its compute weights.

        Adds to `moved` how many elements have other bits than before, once rounded to the compute dtype.
        """
        within, dtype = piece.within(part), self.weights.compute_dtype
        with piece.offload.brought(self._device, piece.weights[within]) as (weights,):
            before = weights.to(dtype, copy=True)
            yield weights, None if piece.rounded is None else piece.rounded[within]
            if not piece.is_copy:
                moved.append(unequal(before, weights.to(dtype)).sum())

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
