"""The order of every sum: constants, token blocks and fixed trees. It imports upload.py only.

Other files define the rest of the order: matmul.py (products with weights), columns.py (column sums),
attention_plan.py (tiles of the attention) and tiles.py (tiles on a GPU).

The references use only operations that give the same bits wherever an element lies in a tensor:

- operations that IEEE 754 rounds exactly (+ - * /);
- `torch.sqrt`, `torch.exp` and `torch.log` in fp32. With MKL (torch 2.13) the square root is one unit in the
  last place off for 17% of numbers, but the same for equal numbers;
- a sum along the last axis of a contiguous row;
- operations that walk a row element after element (cumsum, index_add_).

Some operations of torch differ between the vector body and the scalar tail: silu, sigmoid, addcmul, lerp,
`add(alpha=)`. zerokl does not use them anywhere.

Shapes: T rows (tokens), N width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .upload import upload

# Rows of the matrix product that defines a row's bits on a CPU. They are few, so that a small batch wastes
# little when it decodes.
ROW_TILE = 32
# Tokens of one partial weight gradient. They are enough to be compute-bound, and few enough for an accurate
# sum.
TOKEN_BLOCK = 128
# Bytes that a lane of vLLM's kernel of the router loads at once, and the lanes of a row (topk_softmax.py).
LOAD_BYTES, _LANES = 16, 32
# Widths are padded to a multiple of this many elements, so that no vector is ever cut (matmul.py).
ALIGN = 16
# Elements of one partial sum along a row.
SUM_TILE = 4096


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """The token blocks of a pass, as tensors: the rows of a block may be known on the device only.

    The blocks of virtual shard shards[s] are first[s] to first[s + 1], in canonical order. first[S] is their
    number. Tables may be longer: a block that is not there has start = end. The sequences of a shard are
    given in the same way. Only experts need them (expert_rows.py). They are None for blocks of other rows.
    """

    rows: torch.Tensor  # [n, 2] int32, the first row and the end of each block
    first: torch.Tensor  # [S + 1] int32
    shards: tuple[int, ...]  # [S], the buffer that each shard adds to (grad.GradBuffer)
    sequences: torch.Tensor | None = None  # [m, 2] int32, the first row and the end of each sequence
    first_sequence: torch.Tensor | None = None  # [S + 1] int32

    @cached_property
    def parts(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Each shard with its blocks, on the host. It waits for a device that made the tensors."""
        return self._by_shard(self.rows, self.first)

    @cached_property
    def sequence_parts(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Each shard with the rows of its sequences, on the host."""
        return self._by_shard(self.sequences, self.first_sequence)

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, int, int]:
        """The shard, the first row and the end of each block, [n, 3] int64, on the host; P; the last end.

        Empty blocks are left out. P is the longest block's length, rounded up to a power of two.
        """
        blocks = [(shard, *block) for shard, part in self.parts for block in part if block[0] < block[1]]
        longest = max((end - start for _, start, end in blocks), default=1)
        end = max((end for *_, end in blocks), default=0)
        return torch.tensor(blocks, dtype=torch.int64).view(-1, 3), 1 << (longest - 1).bit_length(), end

    @cached_property
    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The shard of each block [n], and its rows [n, P], on the host (see `bounds`).

        A row's number is one too large. Past the end of a block its rows are 0.
        """
        blocks, length, _ = self.bounds
        rows = np.zeros((len(blocks), length), np.int64)
        for row, (_, start, end) in zip(rows, blocks.tolist(), strict=True):
            row[: end - start] = np.arange(start + 1, end + 1)
        return blocks[:, 0], torch.from_numpy(rows)

    def _by_shard(self, rows: torch.Tensor, first: torch.Tensor) -> list[tuple[int, list[tuple[int, int]]]]:
        bounds = [tuple(row) for row in rows.tolist()]
        pairs = zip(self.shards, pairwise(first.tolist()), strict=True)
        return [(shard, bounds[a:b]) for shard, (a, b) in pairs]

    def on(self, device: torch.device) -> "BlockTables":
        """The tables of the Triton kernels, made once for each device."""
        if device not in self._tables:
            self.arrived(device, upload(device, *self.host_tensors))
        return self._tables[device]

    @property
    def host_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of BlockTables. All but the first may have been made on the device."""
        tables = torch.tensor(self.shards, dtype=torch.int32), self.first, self.rows
        return tables if self.sequences is None else (*tables, self.sequences)

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._tables[device] = BlockTables(*tensors)

    @cached_property
    def _tables(self) -> dict[torch.device, "BlockTables"]:
        return {}

    def chunks(self, rows: int) -> list[tuple[int, int, "TokenBlocks"]]:
        """Consecutive blocks in chunks of at most `rows` rows; a single block may be longer. For the host.

        Of each chunk the first row and the end, and its blocks, whose rows count from the chunk's first row.
        The chunks are made once, so that their tables can go to a device before they are read there.
        """
        if rows not in self._chunks:
            self._chunks[rows] = list(self._cut(rows))
        return self._chunks[rows]

    @cached_property
    def _chunks(self) -> dict[int, list[tuple[int, int, "TokenBlocks"]]]:
        return {}

    def _cut(self, rows: int) -> Iterator[tuple[int, int, "TokenBlocks"]]:
        pending: list[tuple[int, int, int]] = []  # shard, start and end
        for shard, blocks in self.parts:
            for start, end in blocks:
                if pending and end - pending[0][1] > rows:
                    yield _chunk(pending)
                    pending = []
                pending.append((shard, start, end))
        if pending:
            yield _chunk(pending)


class Runs(NamedTuple):
    """Runs of rows that sums add one after another, on a device. A run may be empty.

    The runs first[p] to first[p + 1] belong to the sum at place places[p].
    """

    places: torch.Tensor  # [P] int32
    first: torch.Tensor  # [P + 1] int32
    rows: torch.Tensor  # [n, 2] int32, the first row and the end of each run


class BlockTables:
    """Token blocks on a device, in the forms that the Triton kernels walk. Nothing waits for the device."""

    def __init__(
        self,
        shards: torch.Tensor,
        first: torch.Tensor,
        rows: torch.Tensor,
        sequences: torch.Tensor | None = None,
    ):
        self.shards, self.first, self.rows = shards, first, rows  # [S], [S + 1] and [n, 2]
        self.sequences = sequences  # [m, 2]
        self._pieces: dict[int, torch.Tensor] = {}

    def pieces(self, rows: int) -> torch.Tensor:
        """The first row and the end of each piece of `rows` rows, [n * TOKEN_BLOCK / rows, 2] int32.

        Every block has the same number of pieces; past a short block's end they are empty.
        """
        if rows not in self._pieces:
            offsets = torch.arange(0, TOKEN_BLOCK + rows, rows, dtype=torch.int32, device=self.rows.device)
            bounds = torch.minimum(self.rows[:, :1] + offsets, self.rows[:, 1:])
            self._pieces[rows] = torch.stack([bounds[:, :-1], bounds[:, 1:]], dim=2).view(-1, 2)
        return self._pieces[rows]

    @cached_property
    def runs(self) -> "Runs":
        """Runs of blocks that follow each other, [n, 2].

        All blocks of a run but the last are full. So a kernel that walks a run from its start, in chunks that
        divide TOKEN_BLOCK, never has tokens of two blocks in one chunk. Runs that are not there are empty.
        """
        (start, end), n = self.rows.unbind(1), len(self.rows)
        begins = torch.ones(n + 1, dtype=torch.bool, device=self.rows.device)  # whether a block begins a run
        begins[1:n] = (start[1:] != end[:-1]) | (end[:-1] - start[:-1] != TOKEN_BLOCK)
        begins.index_fill_(0, self.first.long(), True)
        # The blocks that begin runs, in ascending order, and then n. A sort needs no atomics; a cumsum may.
        block = torch.arange(n + 1, dtype=torch.int32, device=self.rows.device)
        block = block.where(begins, n).sort().values
        is_there = (block[:-1] < n).unsqueeze(1)
        run_start, run_end = start[block[:-1].clamp(max=n - 1)], end[block[1:] - 1]
        runs = torch.stack([run_start, run_end], dim=1).where(is_there, 0)
        return Runs(self.shards, torch.searchsorted(block, self.first).int(), runs)


def _chunk(blocks: Sequence[tuple[int, int, int]]) -> tuple[int, int, TokenBlocks]:
    begin, by_shard = blocks[0][1], {}
    for shard, start, end in blocks:
        by_shard.setdefault(shard, []).append((start - begin, end - begin))
    return begin, blocks[-1][2], blocks_of_shards(by_shard)


def blocks_of_rows(rows: Sequence[tuple[int, int]]) -> TokenBlocks:
    """These blocks [start, end), all of shard 0."""
    return blocks_of_shards({0: list(rows)})


def token_blocks(lengths: Sequence[int], shards: Sequence[int] | None = None) -> TokenBlocks:
    """The token blocks of packed sequences, in canonical order.

    lengths [sequences], in rows. shards [sequences]: the virtual shard of each sequence, in ascending order;
    None: all are of shard 0. A shard without rows has no part.

    A block never holds tokens of two sequences. So the contribution of a sequence to a weight gradient is the
    same, whatever the sequence is packed with.
    """
    by_shard: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length, shard in zip(lengths, [0] * len(lengths) if shards is None else shards, strict=True):
        end = start + length
        if length:
            by_shard.setdefault(shard, []).append((start, end))
        start = end
    blocks = {shard: blocks_within(sequences) for shard, sequences in by_shard.items()}
    return TokenBlocks(*_tables(blocks), tuple(by_shard), *_tables(by_shard))


def blocks_within(runs: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """The blocks of runs of rows [start, end). A block never has rows of two runs."""
    return [(a, min(a + TOKEN_BLOCK, end)) for start, end in runs for a in range(start, end, TOKEN_BLOCK)]


def blocks_of_shards(by_shard: Mapping[int, list[tuple[int, int]]]) -> TokenBlocks:
    """The blocks [start, end) of each virtual shard, in this order."""
    return TokenBlocks(*_tables(by_shard), tuple(by_shard))


def _tables(by_shard: Mapping[int, list[tuple[int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of all shards [n, 2], and the first of each shard [S + 1]."""
    rows = list(chain.from_iterable(by_shard.values()))
    first = [0, *accumulate(map(len, by_shard.values()))]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 2), torch.tensor(first, dtype=torch.int32)


def sum_row(x_TN: torch.Tensor) -> torch.Tensor:
    """The sum along the last axis, in an order that depends on N only. [T, N] -> [T]."""
    T, N = x_TN.shape
    if N <= SUM_TILE:  # torch splits a single row over threads only above 32,768 elements
        return x_TN.contiguous().sum(-1)
    tiles = F.pad(x_TN, (0, -N % SUM_TILE)).view(-1, SUM_TILE).sum(-1)
    return tiles.view(T, -1).sum(-1)


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """sum_row for any leading shape. The last axis stays, with size 1."""
    return sum_row(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over `dim` by halving: a binary tree whose shape depends on the length of this axis only."""
    while (n := x.shape[dim]) > 1:
        half = (n + 1) // 2
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, n - half)
        if n % 2:
            low = torch.cat([low.narrow(dim, 0, half - 1) + high, low.narrow(dim, half - 1, 1)], dim)
        else:
            low = low + high
        x = low
    return x.squeeze(dim)


def join_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a power of two of tensors: neighbours pairwise, in the memory of the left ones."""
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def lanes_of(E: int, load: int) -> tuple[int, int, int]:
    """How vLLM's kernel shares a row of E router logits: loads of a lane, lanes, and logits of a load.

    Their product is E, or the next power of two. load: logits that a lane loads at once, at most.
    """
    padded = 1 << (E - 1).bit_length()
    load = min(load, padded)
    loads = max(1, padded // (load * _LANES))
    return loads, padded // (load * loads), load
