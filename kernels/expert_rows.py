"""The rows of a mixture of experts: each token once for every expert that it has, sorted by expert.

Shapes: T tokens, k experts of a token, R rows, E experts.

Rows are sorted by (expert, token). So the rows of an expert lie together, in the order of the tokens. After
them lie rows that pad their number to a multiple of PADDED_ROWS: they are rows of token 0 that nobody reads.
They decide no bit.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Union

import numpy as np
import torch

from .backend import on_triton
from .order import TokenBlocks, blocks_within

if TYPE_CHECKING:
    from .expert_rows_triton import ExpertTables

Bounds = list[tuple[int, int]]  # rows [start, end)
# Then the matrix products of few rows need no copies (grouped_linear._tiles).
PADDED_ROWS = 8
# One call multiplies all experts, where their rows can be made equally many. It takes two thirds of the
# time of a call for each expert, and the time of the padding. So the padded rows are at most _ROWS for each
# row, and _ROWS_OF_CALL for each call that is saved. An expert then has at most _MOST_EQUAL rows, and above
# 8 PADDED_ROWS a multiple of 4 PADDED_ROWS, so that few numbers are probed (grouped_linear._bmm_agrees).
_ROWS, _ROWS_OF_CALL, _MOST_EQUAL = 1.4, 8, 512


class ExpertRows:
    """The rows that the tokens' experts make. ids [T, k] int64: the experts of each token, in its slots.

    A token has an expert once at most.
    """

    def __init__(self, ids: torch.Tensor, experts: int):
        self.experts, self.shape = experts, ids.shape
        k, expert_of_slot = ids.shape[1], ids.reshape(-1).numpy()
        by_expert = np.argsort(expert_of_slot, kind="stable")
        counts = np.bincount(expert_of_slot, minlength=experts)
        padded = counts + -counts % PADDED_ROWS
        most = int(padded.max())
        most += -most % (4 * PADDED_ROWS) if most > 8 * PADDED_ROWS else 0
        allowed = _ROWS * len(by_expert) + _ROWS_OF_CALL * np.count_nonzero(counts)
        self.equal = most <= _MOST_EQUAL and most * experts <= allowed and len(by_expert) > 0
        if self.equal:
            padded = np.full_like(padded, most)
        self._starts = np.cumsum(padded) - padded
        self._ends = self._starts + counts
        rows = np.arange(len(by_expert)) + np.repeat(self._starts - (np.cumsum(counts) - counts), counts)
        slots = np.zeros(padded.sum(), np.int64)
        slots[rows] = by_expert
        places = np.empty_like(by_expert)
        places[by_expert] = rows
        self._slots, self._tokens = torch.from_numpy(slots), slots // k
        self._order = self._tokens  # what the token blocks count
        self.places = torch.from_numpy(places).view(ids.shape)  # [T, k], the row of each token's slot
        self.tokens = torch.from_numpy(self._tokens)  # [R], the token of each row

    @cached_property
    def segments(self) -> list[tuple[int, int, int]]:
        """Each expert that has rows, with its first row and the end of its rows.

        The end is that of the padding to a multiple of PADDED_ROWS.
        """
        counts = self._ends - self._starts
        bounds = zip(self._starts.tolist(), (self._ends + -counts % PADDED_ROWS).tolist(), strict=True)
        return [(expert, a, b) for expert, (a, b) in enumerate(bounds) if a < b]

    @cached_property
    def expert_of_row(self) -> torch.Tensor:
        """The expert of each row, [R] int64; of rows that pad, any one."""
        places = np.searchsorted(self._starts, np.arange(len(self._tokens)), side="right")
        return torch.from_numpy(places - 1)

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
        """Of each virtual shard its experts, and of each expert the token blocks: bounds of rows.

        The rows of an expert in one sequence lie together, because an expert's rows have the order of the
        tokens. They are cut into blocks.
        """
        parts = []
        for shard, sequences in blocks.sequence_parts:
            bounds = np.array(sequences).reshape(-1, 2)
            by_expert = []
            for expert, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
                rows = start + np.searchsorted(self._order[start:end], bounds)
                by_expert.append((expert, blocks_within(rows.tolist())))
            parts.append((shard, by_expert))
        return parts


Rows = Union[ExpertRows, "ExpertTables"]  # on a CPU, and on Triton


def expert_rows(ids: torch.Tensor, experts: int, x: torch.Tensor) -> Rows:
    """The rows that the tokens' experts make. ids [T, k] int64: see ExpertRows. x: the tokens, [T, ...]."""
    if not on_triton(x):
        return ExpertRows(ids, experts)
    from .expert_rows_triton import sort_slots

    return sort_slots(ids, experts)
