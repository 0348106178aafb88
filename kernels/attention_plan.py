"""Which query rows meet which keys: the plan of one attention call, shared by all layers of a forward.

The Triton kernels need only the start, the length and the block table of each sequence (attention_tables.py).
The reference (attention_ref.py) works with an index plan, built at its first use. The reference knows
two kinds of tiles only:

- A query tile is R rows of one (sequence, key-value head), with row = position * group + head within the
  group. So a decoding token brings all its `group` query heads to one tile. By definition, the bits of a row
  are those of a tile of `group` rows rounded up to ROW_UNIT. A longer or a shorter tile is taken only where a
  probe found the same bits (`_agree`), as in matmul.py.
- A key tile is KEY_TILE consecutive positions of one (sequence, key-value head), with the keys and the values
  side by side.

The query tiles are listed in descending order of the number of key tiles that they need. They are cut into
groups of nearly equal need, and the reference computes one group at a time. The place of a row in the plan
never changes its arithmetic. Key tiles that a row does not need are exact no-ops, so the other rows of its
group do not change its bits.

Shapes: S sequences, Hq query heads, Hkv key-value heads, group = Hq / Hkv, n query tiles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from ..files.bitwise import equal
from .attention_rule import WALK, AttentionRule
from .attention_tables import Spans, make_spans
from .upload import upload

# The query tile that defines a row's bits has a multiple of this number of rows.
ROW_UNIT = 8
# Rows of the tiles that may stand for the defining tile. Long tiles share the gathered keys among more rows
# (whole sequences). Short tiles waste less on decoding, which brings only `group` rows. With these tiles a
# step trains in 0.97 of the time and decodes in 0.96 (benchmarks/LOG.md).
_LONG_TILES, _SHORT_TILE = (32, 16), 4
# Keys of one partial sum of the softmax. A constant, because it fixes the order of the softmax's sums.
KEY_TILE = 32
# Key tiles that one group gathers at most. The query tiles of one place, for all key-value heads, may need
# more. The limit bounds memory only.
GROUP_TILES = 1024


@dataclass(frozen=True)
class Group:
    """c query tiles that are computed together, with J key tiles each."""

    start: int  # index of the group's first query tile among the plan's n
    tiles: torch.Tensor  # [c * J] int64, the key tiles; those of one query tile lie side by side
    # [c, M, R, KEY_TILE] fp32, -inf where a key of the last M key tiles is hidden, else 0
    bias: torch.Tensor


@dataclass(frozen=True)
class IndexPlan:
    """Index tensors of one attention call of the reference. Built by `_index_plan`."""

    tile_rows: int  # R
    rows: torch.Tensor  # [n * R] int64, rows of q.view(T * Hq, D); an unused row repeats a valid one
    inverse: torch.Tensor  # [T * Hq] int64, the index of each row of q among the n * R tile rows
    groups: list[Group]


@dataclass(frozen=True)
class AttentionPlan:
    """S packed sequences. Their keys lie in blocks, or, without tables, packed like the sequences.

    query_lengths [S]: the new tokens of each sequence, packed one sequence after another in q.
    contexts [S]: the tokens before the new ones.
    tables [S, J]: for each sequence, the ids of its blocks of KEY_TILE positions. A block holds one key tile
    for each head, so that the key tile of head h is id * Hkv + h.
    """

    query_lengths: Sequence[int]
    contexts: Sequence[int]
    tables: np.ndarray | None
    heads: int
    kv_heads: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, which is also its number of keys, [S]."""
        return tuple(a + b for a, b in zip(self.contexts, self.query_lengths, strict=True))

    def index(self, D: int, dtype: torch.dtype, rule: AttentionRule = WALK) -> IndexPlan:
        """The reference's index plan for heads of width D that are multiplied in `dtype`; made once."""
        if (D, dtype, rule) not in self._indices:
            tables = packed_tables(self.lengths)[0] if self.tables is None else self.tables
            rows = tile_rows(self.query_lengths, self.heads // self.kv_heads, D, dtype)
            self._indices[D, dtype, rule] = _index_plan(
                self.query_lengths, self.contexts, tables, self.heads, self.kv_heads, rows, rule
            )
        return self._indices[D, dtype, rule]

    @cached_property
    def rows(self) -> torch.Tensor:
        """The packed key of each position of each block, [blocks, KEY_TILE].

        For the reference without tables.
        """
        return torch.from_numpy(packed_tables(self.lengths)[1])

    def on(self, device: torch.device) -> Spans:
        """The tensors for the Triton kernels, made once for each device."""
        if device not in self._spans:
            self.arrived(device, upload(device, *self.host_tensors))
        return self._spans[device]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """The tensors of the spans, in the order of their fields."""
        return [x for x in self._host_spans if isinstance(x, torch.Tensor)]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        placed = iter(tensors)
        fields = (next(placed) if isinstance(x, torch.Tensor) else x for x in self._host_spans)
        self._spans[device] = Spans(*fields)

    @cached_property
    def _host_spans(self) -> Spans:
        return make_spans(self.query_lengths, self.contexts, self.tables, self.heads, self.kv_heads)

    @cached_property
    def _spans(self) -> dict[torch.device, Spans]:
        return {}

    @cached_property
    def for_cpp(self) -> dict[tuple, Any]:
        """What attention_cpp.py keeps of this plan."""
        return {}

    @cached_property
    def _indices(self) -> dict[tuple[int, torch.dtype, AttentionRule], IndexPlan]:
        return {}


def tile_rows(query_lengths: Sequence[int], group: int, D: int, dtype: torch.dtype) -> int:
    """Rows of a query tile for these sequences.

    The result is a number that suits the lengths and has the bits of the defining tile. Without such a number
    it is the defining tile's own.
    """
    defining = -(-group // ROW_UNIT) * ROW_UNIT
    mean = sum(query_lengths) * group / len(query_lengths)
    candidates = [_SHORT_TILE] if mean <= _SHORT_TILE else [rows for rows in _LONG_TILES if rows <= mean]
    for rows in candidates:
        if group <= rows and (rows == defining or _agree(rows, defining, D, dtype, torch.get_num_threads())):
            return rows
    return defining


@cache
def _agree(rows: int, defining: int, D: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether query tiles of `rows` rows give the bits of tiles of `defining` rows, probed on random numbers.

    `threads` is a key of the cache only: the library may choose by it.
    """
    g, n = torch.Generator().manual_seed(0), math.lcm(rows, defining)
    q, p = (torch.randn(8, n, width, generator=g, dtype=dtype) for width in (D, KEY_TILE))
    kv = torch.randn(8, 2, KEY_TILE, D, generator=g, dtype=dtype)

    def products(R: int) -> torch.Tensor:
        tiles = kv.repeat_interleave(n // R, 0)
        scores = torch.bmm(q.view(-1, R, D), tiles[:, 0].transpose(1, 2))
        outputs = torch.zeros(8 * n // R, R, D, dtype=dtype)
        outputs.baddbmm_(p.view(-1, R, KEY_TILE), tiles[:, 1])
        return torch.cat([scores.view(-1), outputs.view(-1)])

    return equal(products(rows), products(defining))


def _index_plan(
    query_lengths: Sequence[int],
    contexts: Sequence[int],
    tables: np.ndarray,
    heads: int,
    kv_heads: int,
    R: int,
    rule: AttentionRule,
) -> IndexPlan:
    """The reference's plan, with R rows in a query tile. AttentionPlan explains the other arguments.

    With a window, the key tiles (or the chunks) before that of a query tile's first row are left out.
    """
    group, window, begin_unit = heads // kv_heads, rule.window, rule.chunk or KEY_TILE
    q_len, context = np.asarray(query_lengths, np.int64), np.asarray(contexts, np.int64)
    start = np.cumsum(q_len) - q_len
    per_seq = -(-q_len * group // R)  # query tiles of one key-value head
    seq = np.repeat(np.arange(len(q_len)), per_seq)
    within = np.arange(len(seq)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    flat = within[:, None] * R + np.arange(R)  # row of the tile -> position * group + head in the group
    last = (q_len[seq] * group - 1)[:, None]
    need = (context[seq] + np.minimum(flat[:, -1], last[:, 0]) // group) // KEY_TILE + 1
    begin = np.zeros_like(need)
    if window:
        lowest = np.maximum(context[seq] + flat[:, 0] // group - window + 1, 0)
        begin = lowest // begin_unit * (begin_unit // KEY_TILE)
        need -= begin
    by_need = np.argsort(-need, kind="stable")
    seq, flat, last, need, begin = (x[by_need] for x in (seq, flat, last, need, begin))
    valid, flat = flat <= last, np.minimum(flat, last)
    step = flat // group
    position = context[seq][:, None] + step

    h = np.arange(kv_heads)
    in_q = (start[seq][:, None] + step) * heads + flat % group
    row = in_q[:, None, :] + (h * group)[:, None]  # [query tiles of one head, Hkv, R]
    inverse = np.empty(int(q_len.sum()) * heads, np.int64)
    used = np.broadcast_to(valid[:, None, :], row.shape)
    inverse[row[used]] = np.flatnonzero(used)

    groups = []
    for a, b in _group_bounds(need, kv_heads):
        J = int(need[a])
        # A query tile that needs fewer than J key tiles repeats its last one: it reads only its own sequence.
        ids = tables[seq[a:b, None], begin[a:b, None] + np.minimum(np.arange(J), need[a:b, None] - 1)]
        tiles = (ids[:, None, :] * kv_heads + h[:, None]).reshape(-1)
        first_key = 0 if window else int(position[a:b, 0].min()) // KEY_TILE * KEY_TILE
        keys = begin[a:b, None] * KEY_TILE + np.arange(first_key, J * KEY_TILE)
        keys, rows = keys.reshape(b - a, -1, 1, KEY_TILE), position[a:b, None, :, None]
        hidden = rows < keys  # [query tiles of one head, M, R, KEY_TILE]
        if window:
            hidden |= keys <= rows - window
        bias = np.repeat(np.where(hidden, np.float32(-np.inf), np.float32(0)), kv_heads, axis=0)
        groups.append(Group(a * kv_heads, torch.from_numpy(tiles), torch.from_numpy(bias)))
    return IndexPlan(R, torch.from_numpy(row.reshape(-1)), torch.from_numpy(inverse), groups)


def _group_bounds(need: np.ndarray, kv_heads: int) -> list[tuple[int, int]]:
    """Groups [a, b) of query tiles that waste at most a quarter of their key tiles.

    need: the number of key tiles that each query tile of one key-value head needs, in descending order.
    """
    bounds, a = [], 0
    while a < len(need):
        J = int(need[a])
        fit = max(1, GROUP_TILES // (J * kv_heads))
        b = min(a + fit, int(np.searchsorted(-need, -(J - J // 4), side="right")))
        bounds.append((a, b))
        a = b
    return bounds


def packed_tables(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tables for sequences of `lengths` keys that lie packed (training).

    Returns tables [S, J] and rows [blocks, KEY_TILE]: the packed row of each position of each block. A
    position past the end of a sequence repeats the sequence's last row. The mask hides this position, and
    nothing of another sequence is read.
    """
    counts = [-(-length // KEY_TILE) for length in lengths]
    tables = np.zeros((len(counts), max(counts, default=0)), np.int64)
    rows, base, start = [], 0, 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[s, :count] = base + np.arange(count)
        rows.append(start + np.minimum(np.arange(count * KEY_TILE), length - 1))
        base, start = base + count, start + length
    return tables, np.concatenate(rows).reshape(-1, KEY_TILE) if rows else np.zeros((0, KEY_TILE), np.int64)
