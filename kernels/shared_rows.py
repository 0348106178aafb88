"""Rows of a pass that ranks share: context parallelism, as Ulysses cuts it (Jacobs et al., arXiv:2309.14509).

Each rank has all weights, and an equal part of the rows. Between two exchanges, around attention, it has all
rows of an equal part of the heads. A row knows no other row outside of attention, and a head no other head
inside it. So the forward and all gradients of rows have the bits of one rank.

A weight's gradient is a sum over all rows. Each rank sums it for an equal part of the weight along axis 0:

    dw[part] = sum over token blocks of dy_b[:, part]^T x_b

For it the ranks give each other columns of dy, and all of x. So each element of dw is one chain over the
token blocks of all rows, as on one rank, and no rank waits for the sum of another one.

Shapes: T rows of all n ranks, t = T / n rows of this one; N columns, H heads, D width of a head.
Roundings: none. Nothing is added here.
"""

from dataclasses import dataclass

import torch

from .leaves import ALONE, Carrier, owned_rows


@dataclass(frozen=True)
class SharedRows:
    """The ranks that share the rows of a pass. Alone, each method returns what it is given."""

    ranks: Carrier = ALONE

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of x [T, ...] -> [t, ...]. The ranks must divide T."""
        return x if self.size == 1 else x.chunk(self.size)[self.ranks.rank]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks. x [t, ...] -> [T, ...]. All ranks call it together. It has no gradient."""
        return x if self.size == 1 else torch.cat(self.ranks.all_gather(x))

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of this rank's columns. x [t, N, ...] -> [T, N / n, ...]. It has no gradient."""
        return x if self.size == 1 else torch.cat(self.ranks.exchange(list(x.chunk(self.size, 1))))

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `columns`."""
        return x if self.size == 1 else torch.cat(self.ranks.exchange(list(x.chunk(self.size))), 1)

    def among_zeros(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's part [N / n, ...] of a gradient, in its place among -0.0 -> [N, ...].

        A number and -0.0 add up to the number, 0.0 and -0.0 among them. So a sum over the ranks is exact.
        """
        if self.size == 1:
            return part
        whole = part.new_full((self.size * len(part), *part.shape[1:]), -0.0)
        self.mine(whole).copy_(part)
        return whole

    def shares(self, a: int, b: int) -> slice | torch.Tensor:
        """Which of the rows [a, b) that all ranks have are this rank's to compute; as many in each rank.

        `whole` and `columns` put them together again. Rows beyond the b - a first ones repeat the last one.
        """
        if self.size == 1:
            return slice(a, b)
        n = -(-(b - a) // self.size)
        return torch.arange(n).add_(a + self.ranks.rank * n).clamp_(max=b - 1)

    def owned(self, ids: torch.Tensor, N: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of this rank's ids, of N in each rank, and their places here (leaves.owned_rows)."""
        return owned_rows(self.ranks, ids, N)


ALL_ROWS = SharedRows()


class _Carried(torch.autograd.Function):
    """What `there` makes of x. What `back` makes of the result's gradient is x's."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.back(dx), None, None


def all_rows(x: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """The rows of all ranks. x [t, D] -> [T, D]. Every rank must have the whole gradient of the result."""
    return x if shared.size == 1 else _Carried.apply(x, shared.whole, shared.mine)


def rows_of_this(x: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """The inverse of all_rows: this rank's rows of what all ranks have. x [T, D] -> [t, D]."""
    return x if shared.size == 1 else _Carried.apply(x, shared.mine, shared.whole)


def heads_of_rank(shared: SharedRows, *parts: torch.Tensor) -> list[torch.Tensor]:
    """All rows of this rank's heads of each part, such as q, k and v, by one exchange.

    parts: [t, H, D] each, of one D, where the ranks divide each H -> [T, H / n, D] each.
    """
    cut = [part.chunk(shared.size, 1) for part in parts]
    together = torch.cat([x for parts_of in zip(*cut, strict=True) for x in parts_of], 1)
    return list(_Carried.apply(together, shared.columns, shared.rows).split([x[0].shape[1] for x in cut], 1))


def rows_of_rank(shared: SharedRows, x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of all heads. x [T, H / n, D] -> [t, H, D]."""
    return _Carried.apply(x, shared.rows, shared.columns)
