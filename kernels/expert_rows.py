"""The rows of a mixture of experts: each token once for every expert that it has, sorted by expert.

Shapes: T tokens, k experts of a token, R = T k rows, E experts.

Rows are sorted by (expert, token). So the rows of an expert lie together, in the order of the tokens.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from .order import TokenBlocks

Bounds = list[tuple[int, int]]  # rows [start, end)


class ExpertRows:
    """The rows that the tokens' experts make. ids [T, k] int64: the experts of each token, in its slots.

    A token has an expert once at most.
    """

    def __init__(self, ids: torch.Tensor, experts: int):
        (T, k), self.experts = ids.shape, experts
        expert_of_row, self._slots = ids.reshape(-1).sort(stable=True)
        self.tokens = self._slots // k  # [R], the token of each row
        # [T, k], the row of each token's slot.
        self.places = torch.empty_like(self._slots).scatter_(0, self._slots, torch.arange(T * k)).view(T, k)
        self._ends = torch.searchsorted(expert_of_row, torch.arange(experts + 1)).tolist()

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """Each expert that has rows, with its first row and its end."""
        return [(e, a, b) for e, (a, b) in enumerate(pairwise(self._ends)) if a < b]

    def of_slots(self, x_Tk: torch.Tensor) -> torch.Tensor:
        """A number of each slot, [T, k] -> that of each row, [R]."""
        return x_Tk.reshape(-1)[self._slots]

    def sum_slots(self, x_RN: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, slot after slot from 0. -> [T, N] in the dtype of x."""
        y = x_RN.new_zeros(self.places.shape[0], x_RN.shape[1])
        for rows in self.places.unbind(1):
            y += x_RN[rows]
        return y

    def blocks(self, blocks: TokenBlocks) -> list[tuple[int, list[tuple[int, Bounds]]]]:
        """Of each virtual shard its experts, and of each expert the rows of every token block that has some.

        The rows of a block's tokens lie together, because an expert's rows have the order of the tokens.
        """
        tokens, parts = self.tokens.numpy(), []
        for shard, shard_blocks in blocks.parts:
            bounds = np.array(shard_blocks).reshape(-1, 2)
            by_expert = []
            for expert, start, end in self.segments:
                rows = start + np.searchsorted(tokens[start:end], bounds)
                by_expert.append((expert, [(a, b) for a, b in rows.tolist() if a < b]))
            parts.append((shard, by_expert))
        return parts
