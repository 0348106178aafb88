"""Which weights Muon updates, and which rank computes each polar factor (kernels/polar.py).

Muon has the matrices of the layers. Embedding, lm_head, a critic's head, norms, biases and convolutions have
AdamW, as Jordan et al. advise (kellerjordan.github.io/posts/muon). A matrix is one tensor of a checkpoint, so
q, k and v, or gate and up, are apart; of a tensor that stacks experts it is each expert's. A matrix of one
row or of one column counts as a vector.

A polar factor needs its whole matrix, of which ranks have parts. In a round each rank gets one matrix, and
gives everyone's parts of its step back. Only copies travel, so ranks decide no bit.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from ...kernels.polar import polar
from ...model.weights import FlatLayout
from .parallel.spread import Moves, Range, Spread, in_common, merged

Adjustment = Literal["match_rms_adamw", "original"]


class Matrix(NamedTuple):
    """A matrix that Muon updates, [rows, columns], from `start` on in the flat tensor.

    inputs: whether its rows are a product's inputs, and not its outputs, as of a tensor that stacks experts.
    """

    start: int
    rows: int
    columns: int
    inputs: bool = False

    @property
    def range(self) -> Range:
        return self.start, self.start + self.rows * self.columns

    def lr_ratio(self, adjustment: Adjustment) -> float:
        """By what the learning rate is multiplied, by torch.optim.Muon's names.

        original: Jordan's. match_rms_adamw: the root mean square of a step becomes about 0.2, as AdamW's is
        (Liu et al., arXiv:2502.16982, section 2.2).
        """
        outputs, inputs = (self.columns, self.rows) if self.inputs else (self.rows, self.columns)
        if adjustment == "original":
            return math.sqrt(max(1.0, outputs / inputs))
        return 0.2 * math.sqrt(max(outputs, inputs))


class Round(NamedTuple):
    """One matrix of each rank, or none in the last round. moves: from the ranks' parts of these matrices.

    places: of this rank's parts in its vector. matrix: this rank's.
    """

    places: list[slice]
    moves: Moves
    matrix: Matrix | None

    def steps(
        self, directions: torch.Tensor, iterations: int, lr: float, adjustment: Adjustment
    ) -> torch.Tensor:
        """What is subtracted from this rank's parts of the matrices. All ranks call this together.

        directions: what is orthogonalised, of these parts one after another, as the steps are. iterations,
        adjustment: see polar and Matrix.lr_ratio.
        """
        vector = self.moves.there(directions)
        if self.matrix:
            whole = vector.view(self.matrix.rows, self.matrix.columns)
            vector = (polar(whole, iterations) * (lr * self.matrix.lr_ratio(adjustment))).view(-1)
        return self.moves.back(vector)


def matrices(layout: FlatLayout) -> Iterator[Matrix]:
    """The trained ones, in the order of the flat tensor."""
    for entry in layout.trained:
        if not entry.name.startswith("layers.") or entry.name.endswith("_bias"):
            continue
        start, width = entry.offset, entry.shape[1:]
        if len(width) == 1:
            tensors = [(rows, width[0], False) for _, rows in entry.parts]
        else:
            tensors = [(*width, True)] * entry.shape[0] if len(width) == 2 else []
        for rows, columns, inputs in tensors:
            if min(rows, columns) > 1:
                yield Matrix(start, rows, columns, inputs)
            start += rows * columns


def rounds(layout: FlatLayout, spread: Spread) -> list[Round]:
    """All rounds. spread: of what is trained over the ranks."""
    ranks = spread.ranks
    all_matrices = list(matrices(layout))
    flat = [matrix.range for matrix in all_matrices]
    # Of each matrix, by the rank: where its parts begin in the rank's vector, and their ranges.
    parts: list[list[list[tuple[int, Range]]]] = [[[] for _ in spread.ranges_of] for _ in flat]
    for rank, ranges in enumerate(spread.ranges_of):
        for i, start, part in in_common(ranges, flat):
            parts[i][rank].append((start, part))
    # Neighbours in this order take about the same time: ranks wait for the slowest of a round.
    costs = [matrix.rows * matrix.columns * min(matrix.rows, matrix.columns) for matrix in all_matrices]
    order = sorted(range(len(flat)), key=lambda i: -costs[i])
    made = []
    for first in range(0, len(order), ranks.size):
        members = sorted(order[first : first + ranks.size])
        here = [[part for i in members for part in parts[i][rank]] for rank in range(ranks.size)]
        there = [[flat[i]] for i in members] + [[]] * (ranks.size - len(members))
        moves = Moves(
            Spread([[part for _, part in rank_parts] for rank_parts in here], ranks), Spread(there, ranks)
        )
        places = merged([(start, start + b - a) for start, (a, b) in here[ranks.rank]])
        mine = all_matrices[members[ranks.rank]] if ranks.rank < len(members) else None
        made.append(Round([slice(*place) for place in places], moves, mine))
    return made
