"""Sums that tensor parallelism may cut: leaves of one fixed binary tree, also on one rank.

    y = round( tree( leaf_0, .., leaf_(G-1) ) )

A leaf is the fp32 sum over one of G equal parts of what is summed, in the order that the whole sum has
without leaves. Neighbours are added pairwise, and the root is rounded once. n ranks, n a divisor of G, have
G / n neighbouring leaves each: a subtree. They carry their roots to each other, and each rank joins all of
them by the tree's upper levels. So G decides bits, and n decides none. With G = 1 nothing changes.

What is summed by leaves: the output of o and down, over K; dx of qkv, gate_up and lm_head, over N; the sums
over the vocabulary (logprob.py); dwq and dwk, over heads (qk_norm.py); rows of LoRA's gradient (low_rank.py).

Shapes: x [T, K]; w [N, K]; y [T, N] in fp32 (fp64 for fp64).
Roundings: none. A product of two 16-bit numbers is exact in fp32, so a leaf is computed from fp32 numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from .matmul import matmul_leaves
from .order import join_pairs, sum_row
from .tile_tables import DEFAULT_TABLE, TileTable

# Roots of as many bytes or more are joined by parts, from four ranks on. Fewer bytes cost less than a second
# carry.
_LARGE_BYTES = 1 << 16


class Carrier(Protocol):
    """The ranks that share one copy of the weights. It carries bits and adds nothing."""

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x of every rank, in their order. All have one shape and dtype. All ranks call it together."""
        ...

    def exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What every rank has for this one, in their order. parts: for each rank, of one shape."""
        ...

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """The rows that every rank has for this one, rank after rank.

        x [sum(sent), N]: for all ranks, one after another. sent, received: rows to each rank, and from it.
        """
        ...


class _Alone:
    """One rank."""

    rank, size = 0, 1

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return x


ALONE = _Alone()


def owned_rows(ranks: Carrier, ids: torch.Tensor, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank's ids among those of all [T], and their places in this rank, which has N."""
    local = ids - ranks.rank * N
    rows = ((local >= 0) & (local < N)).nonzero().squeeze(1)
    return rows, local[rows]


@dataclass(frozen=True)
class Leaves:
    """The leaves of each sum, and the ranks that share them.

    count: G, which is 1, 2, 4 or 8. Raises ValueError for another one, and where the ranks do not divide it.
    """

    count: int = 1
    ranks: Carrier = ALONE

    def __post_init__(self) -> None:
        if self.count not in (1, 2, 4, 8) or self.count % self.ranks.size:
            raise ValueError(
                f"leaves ({self.count}) must be 1, 2, 4 or 8, and a multiple of the ranks "
                f"({self.ranks.size}) that share them"
            )

    @property
    def mine(self) -> int:
        """The leaves of this rank."""
        return self.count // self.ranks.size

    def join(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the leaves of all ranks, in every rank. leaves: this rank's; their memory is taken.

        Each rank gets all roots, or, where they are large, adds up a part of the rows and gives it to the
        others: 2 / n of the bytes. A row knows no other row, so the way decides no bit.
        """
        root, n = join_pairs(leaves), self.ranks.size
        if n < 4 or root.nbytes < _LARGE_BYTES:
            return join_pairs(self.ranks.all_gather(root))
        rows = -(-len(root) // n)
        padded = F.pad(root, (0, 0) * (root.dim() - 1) + (0, rows * n - len(root)))
        part = join_pairs(self.ranks.exchange(list(padded.split(rows))))
        return torch.cat(self.ranks.all_gather(part))[: len(root)]

    def sum_row(self, x_TN: torch.Tensor) -> torch.Tensor:
        """order.sum_row by leaves: of the columns of all ranks. x [T, N] of this rank -> [T]."""
        return self.join([sum_row(leaf) for leaf in x_TN.chunk(self.mine, 1)])

    def highest(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over the ranks, in every rank. It is exact."""
        return x if self.ranks.size == 1 else torch.stack(self.ranks.all_gather(x)).amax(0)

    def owned(self, ids: torch.Tensor, N: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of this rank's ids among those of all ranks, and their places here (owned_rows)."""
        return owned_rows(self.ranks, ids, N)

    def chosen(self, x_TN: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x[t, ids[t]] in every rank, [T]. x has this rank's columns; the ids count those of all ranks."""
        if self.ranks.size == 1:
            return x_TN.gather(1, ids.unsqueeze(1)).squeeze(1)
        rows, columns = self.owned(ids, x_TN.shape[1])
        values = x_TN.new_zeros(len(ids)).index_put((rows,), x_TN[rows, columns])
        return self.of_owners(values, ids // x_TN.shape[1])

    def of_owners(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Of each row of x [T, ...] the owner's, in every rank. Nothing is added, so a -0.0 stays one."""
        return torch.stack(self.ranks.all_gather(x))[owners, torch.arange(len(x), device=x.device)]

    def whole_rows(self, x_TN: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks."""
        return x_TN if self.ranks.size == 1 else torch.cat(self.ranks.all_gather(x_TN), 1)

    def own_columns(self, x_TN: torch.Tensor) -> torch.Tensor:
        """This rank's columns of what whole_rows gave."""
        return x_TN.chunk(self.ranks.size, 1)[self.ranks.rank]

    @property
    def alone(self) -> "Leaves":
        """The same leaves, all in this rank."""
        return Leaves(self.count)

    def inputs(self, *widths: int) -> "Cut":
        """Of a product whose K is cut: its output is joined. widths: of the parts of K in this rank."""
        return Cut(self, widths, output=True)

    def outputs(self, *widths: int) -> "Cut":
        """Of a product whose N is cut: its dx is joined. widths: of the parts of N in this rank."""
        return Cut(self, widths, output=False)


WHOLE = Leaves()


class Cut(NamedTuple):
    """How a product with a weight is cut: its K (output: it is the output that is a sum of leaves), or its N.

    widths: of the parts that lie one after another along the cut axis, such as q, k and v. A leaf has an
    equal piece of each, summed in one chain.
    """

    leaves: Leaves
    widths: tuple[int, ...]
    output: bool

    def within(self, rows: slice) -> "Cut":
        """Of the rows of the weight [N, K] in this rank, which are whole parts of what is cut along N."""
        if self.output:
            return self
        ends = accumulate(self.widths)
        widths = [n for n, end in zip(self.widths, ends, strict=True) if rows.start < end <= rows.stop]
        return self._replace(widths=tuple(widths))

    @property
    def joins_output(self) -> bool:
        """Whether the output of the product is a sum of leaves."""
        return self.output and self.leaves.count > 1

    @property
    def joins_dx(self) -> bool:
        """Whether its input's gradient is a sum of leaves."""
        return not self.output and self.leaves.count > 1

    def product(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        pack: torch.Tensor | None = None,
        tiles: TileTable = DEFAULT_TABLE,
    ) -> torch.Tensor:
        """x w^T by the leaves of all ranks, not rounded. K is cut. pack, tiles: see matmul."""
        mine, ranks = self.leaves.mine, self.leaves.ranks.size
        return self.leaves.join([matmul_leaves(x_TK, w_NK, mine, self.widths, pack, tiles, ranks)])

    def whole(self, w_NK: torch.Tensor) -> tuple[int, int]:
        """N and K of the matrix of which w is this rank's part."""
        (N, K), n = w_NK.shape, self.leaves.ranks.size
        return (N, K * n) if self.output else (N * n, K)


UNCUT = WHOLE.inputs()
