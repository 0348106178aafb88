"""Experts that ranks share: expert parallelism (Lepikhin et al., arXiv:2006.16668), without a changed bit.

Each of n ranks has an equal part of the experts of a layer, neighbours in their order, and all rows of a
pass. It computes the rows of its experts alone. Then rows travel: each goes to the rank that adds up its
token. These are an equal part of the tokens for each rank, which gives the sums to all. The gradients of
rows and of routing weights take the same ways.

    y_t = sum over the slots j of t of  q_tj expert(x_t)     slot after slot, in the rank that adds up t
    dw_e = sum over the rows of e, in the rank of e: all rows of the pass, in the order of one rank

A row of an expert's product knows no other row, and the slots of a token are added in their order. An expert
sees its rows in the order of the tokens, cut into the token blocks of one rank. So n decides no bit.

Shapes: T tokens, k experts of a token, E experts; R rows of this rank's experts; t = ceil(T / n) tokens that
this rank adds up; n ranks.
Roundings: those of one rank. The slots are added in fp32 and the sum is rounded once, here too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .expert_rows import ExpertRows
from .grad import accumulate_dtype
from .leaves import ALONE, Carrier


class OwnRows(ExpertRows):
    """The rows of a rank's experts. Each has one slot, and is a token of its own.

    experts_R [R]: the expert of each row, counted in the rank; tokens_R [R]: its token. Both ascend: first
    the experts, then the tokens of each.
    """

    def __init__(self, experts_R: np.ndarray, tokens_R: np.ndarray, experts: int):
        super().__init__(torch.from_numpy(experts_R).unsqueeze(1), experts)
        self._order = tokens_R[self._tokens]


@dataclass(frozen=True)
class SharedExperts:
    """The ranks that share the experts of each layer."""

    ranks: Carrier = ALONE

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def mixture(
        self,
        x_TD: torch.Tensor,
        q_Tk: torch.Tensor,
        ids_Tk: torch.Tensor,
        experts: int,
        weighted: Callable[[torch.Tensor, torch.Tensor, ExpertRows], torch.Tensor],
    ) -> torch.Tensor:
        """The weighted sum of the experts of each token, [T, D], in every rank. All ranks call it together.

        weighted: of rows [R, D] with routing weights [R, 1], what this rank's experts give, [R, D].
        """
        ways = _Ways(self.ranks, ids_Tk, experts)
        return _Summed.apply(weighted(*_Rows.apply(x_TD, q_Tk, ways), ways.rows), ways)


ALL_EXPERTS = SharedExperts()


class _Ways:
    """Which slots are of this rank's experts, and the ways of their rows to the tokens' ranks."""

    def __init__(self, ranks: Carrier, ids_Tk: torch.Tensor, experts: int):
        (self.T, k), n = ids_Tk.shape, ranks.size
        self._ranks, self._t, owned = ranks, -(-self.T // n), experts // n
        expert_of_slot = ids_Tk.reshape(-1).numpy()
        by_expert = np.argsort(expert_of_slot, kind="stable")  # as ExpertRows sorts all slots
        owner, adder = expert_of_slot[by_expert] // owned, by_expert // k // self._t
        mine, here = owner == ranks.rank, adder == ranks.rank
        slots = by_expert[mine]
        self.slots, self.tokens = torch.from_numpy(slots), torch.from_numpy(slots // k)
        self.rows = OwnRows(expert_of_slot[slots] - ranks.rank * owned, slots // k, owned)
        self._order = torch.from_numpy(np.argsort(adder[mine], kind="stable"))
        self._sent, self._received = (
            np.bincount(x, minlength=n).tolist() for x in (adder[mine], owner[here])
        )
        # Those that arrive come rank after rank, so they are sorted by expert and token, too.
        arriving = by_expert[here]
        places = np.empty_like(arriving)
        places[arriving - ranks.rank * self._t * k] = np.arange(len(arriving))
        self._places = torch.from_numpy(places).view(-1, k)

    def carried(self, x_R: torch.Tensor) -> torch.Tensor:
        """The rows of the tokens that this rank adds up, of what every rank has for its rows."""
        return self._ranks.exchange_rows(x_R[self._order], self._sent, self._received)

    def summed(self, x_RN: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, slot after slot from 0, of all ranks' rows. -> [T, N] in all."""
        carried = self.carried(x_RN).to(accumulate_dtype(x_RN.dtype))
        y = carried.new_zeros(len(self._places), x_RN.shape[1])
        for rows in self._places.unbind(1):
            y += carried[rows]
        return self._in_all(y.to(x_RN.dtype))

    def of_slots(self, x_R1: torch.Tensor) -> torch.Tensor:
        """A number of each row of all ranks, as that of each slot, [T, k] in all."""
        return self._in_all(self.carried(x_R1).squeeze(1)[self._places])

    def _in_all(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of all ranks, of those that this one has added up."""
        padded = F.pad(x, (0, 0, 0, self._t - len(x)))
        return torch.cat(self._ranks.all_gather(padded))[: self.T]


class _Rows(torch.autograd.Function):
    """x [T, D] and q [T, k] of the rows of this rank's experts, [R, D] and [R, 1]."""

    @staticmethod
    def forward(ctx, x, q, ways):
        ctx.ways = ways
        return x[ways.tokens], q.reshape(-1)[ways.slots].unsqueeze(1)

    @staticmethod
    def backward(ctx, dx, dq):
        return ctx.ways.summed(dx), ctx.ways.of_slots(dq), None


class _Summed(torch.autograd.Function):
    """The sum of each token's rows, [T, D], of rows [R, D]."""

    @staticmethod
    def forward(ctx, y, ways):
        ctx.ways = ways
        return ways.summed(y)

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.ways.tokens], None
