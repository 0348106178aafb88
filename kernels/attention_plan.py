"""Which query rows meet which key tiles: the index plan of one attention call, shared by all layers of a forward.

The kernel (attention.py) knows two kinds of tiles only:

- a query tile: R rows of one (sequence, key-value head), row = position * group + head within the group, so that a
  decoding token brings all its `group` query heads to one tile, and R = `group` rounded up to ROW_UNIT wastes little;
- a key tile: KEY_TILE consecutive positions of one (sequence, key-value head), its keys and its values side by side.

The plan lists the query tiles in descending order of the number of key tiles they need. Key tile j is then needed by a
prefix of that list, and the kernel works on prefixes: no work for keys that nobody sees, for any mix of prefill,
chunked prefill and decode. Where a row lies in the plan never changes its arithmetic.

Shapes: S sequences, Hq query heads, Hkv key-value heads, group = Hq / Hkv, n query tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

# Rows of a query tile are a multiple of this. Large tiles share the gathered keys among more rows (prefill), small ones favour
# decoding, which brings only `group` rows; 8 was best for both together of 4, 8 and 16.
ROW_UNIT = 8
# Keys of one step of the online softmax. A constant: it fixes the order of the softmax's sums.
KEY_TILE = 32


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors of one attention call. Built by `plan_attention`."""

    heads: int
    kv_heads: int
    tile_rows: int  # R
    rows: torch.Tensor  # [n * R] int64, rows of q.view(T * Hq, D); unused rows repeat a valid one
    inverse: torch.Tensor  # [T * Hq] int64, where each row of q lies among the n * R tile rows
    tiles: list[torch.Tensor]  # per step j: [c_j] int64, the key tile of each query tile that needs step j
    hidden: list[torch.Tensor | None]  # per step j: [c_j, R, KEY_TILE] bool, True where the key is masked
    query_lengths: tuple[int, ...]  # tokens of each sequence in q

    @cached_property
    def starts(self) -> np.ndarray:
        """First row of each sequence in q, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.query_lengths)])


def plan_attention(
    query_lengths: Sequence[int],
    contexts: Sequence[int],
    tables: np.ndarray,
    heads: int,
    kv_heads: int,
) -> AttentionPlan:
    """The plan for S packed sequences whose keys lie in key tiles.

    query_lengths [S]: new tokens of each sequence, packed one after another in q. contexts [S]: tokens before them.
    tables [S, J]: for each sequence the ids of its blocks of KEY_TILE positions; a block holds one key tile a head, so
    that the key tile of head h is id * Hkv + h.
    """
    group = heads // kv_heads
    R = -(-group // ROW_UNIT) * ROW_UNIT
    q_len, context = np.asarray(query_lengths, np.int64), np.asarray(contexts, np.int64)
    start = np.concatenate([[0], np.cumsum(q_len)[:-1]])
    per_seq = -(-q_len * group // R)  # query tiles of one key-value head
    seq = np.repeat(np.arange(len(q_len)), per_seq)
    within = np.arange(len(seq)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
    flat = within[:, None] * R + np.arange(R)  # row of the tile -> position * group + head in group
    valid = flat < (q_len[seq] * group)[:, None]
    flat = np.minimum(flat, (q_len[seq] * group - 1)[:, None])
    position = context[seq][:, None] + flat // group
    need = position[:, -1] // KEY_TILE + 1
    by_need = np.argsort(-need, kind="stable")
    seq, flat, valid, position, need = (a[by_need] for a in (seq, flat, valid, position, need))

    n = len(seq)
    h = np.arange(kv_heads)
    token = start[seq][:, None] + flat // group
    row = token[:, None, :] * heads + h[None, :, None] * group + (flat % group)[:, None, :]  # [n, Hkv, R]
    inverse = np.empty(int(q_len.sum()) * heads, np.int64)
    slots = np.arange(n * kv_heads * R).reshape(n, kv_heads, R)
    used = np.broadcast_to(valid[:, None, :], row.shape)
    inverse[row[used]] = slots[used]

    tiles, hidden = [], []
    keys = np.arange(KEY_TILE)
    for j in range(int(need[0]) if n else 0):
        c = int(np.searchsorted(-need, -j))  # need is descending: how many tiles have need > j
        ids = tables[seq[:c], j]
        tiles.append(torch.from_numpy((ids[:, None] * kv_heads + h).reshape(-1)))
        first = position[:c, 0]
        if (first >= j * KEY_TILE + KEY_TILE - 1).all():
            hidden.append(None)
        else:
            mask = position[:c, :, None] < j * KEY_TILE + keys
            mask = np.repeat(mask, kv_heads, axis=0)
            hidden.append(torch.from_numpy(mask))
    return AttentionPlan(
        heads, kv_heads, R, torch.from_numpy(row.reshape(-1)), torch.from_numpy(inverse), tiles, hidden, tuple(int(x) for x in q_len)
    )


def packed_tables(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tables for whole sequences whose keys lie packed beside their queries (training).

    Returns tables [S, J] and rows [blocks, KEY_TILE]: for each block the packed row of each of its positions. Positions
    past the end of a sequence repeat its own last row: the mask hides them, and nothing of another sequence is read.
    """
    counts = [-(-length // KEY_TILE) for length in lengths]
    tables = np.zeros((len(counts), max(counts, default=0)), np.int64)
    rows, base, start = [], 0, 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[s, :count] = base + np.arange(count)
        rows.append(start + np.minimum(np.arange(count * KEY_TILE), length - 1))
        base, start = base + count, start + length
    return tables, np.concatenate(rows).reshape(-1, KEY_TILE) if rows else np.zeros((0, KEY_TILE), np.int64)
