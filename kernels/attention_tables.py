"""The tables of one attention call for the Triton kernels: where sequences, tiles and pages lie.

Shapes: S sequences, T rows of q, K packed keys, J pages of a sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

# The rows of a program of the kernels that read through TMA (attention_tma_triton.py), and the keys of one in
# their backward, where they order sums.
TILE_ROWS, TILE_KEYS = 64, 64
# Programs of these kernels that run at about the same time on an H100: four on each multiprocessor.
_WAVE = 528


class SharedChunks(NamedTuple):
    """Work of a decoding turn over chunks of keys (attention_split_triton.py): int32, on the kernels' device.

    Each chunk of each token is in one item. An item without tokens is unused.
    """

    items: torch.Tensor  # [items, 3], the row of the block table, the first chunk, and the end of its chunks
    tokens: torch.Tensor  # [items, slots], rows of q, -1 for none

    def of_rows(self, n: int) -> "SharedChunks":
        """The tables of n tokens, where they lie."""
        return SharedChunks(self.items[: 2 * n], self.tokens[: 2 * n])


class Spans(NamedTuple):
    """One attention call as the Triton kernels take it: int32 tensors on the kernels' device."""

    cu_seqlens_q: torch.Tensor  # [S + 1], the first row of each sequence in q, and T
    seqused_k: torch.Tensor  # [S], tokens of each sequence, including those before its queries
    block_table: torch.Tensor | None  # [S, J], the pages of each sequence's keys; None for packed keys
    kv_heads: int
    cu_seqlens_k: torch.Tensor | None = None  # [S + 1], the first key of each sequence, and K; packed only
    query_tiles: torch.Tensor | None = None  # query_tile_table; packed only
    key_tiles: torch.Tensor | None = None  # key_tile_table; packed only
    shared: SharedChunks | None = None  # of one token of each sequence; None: nothing is shared


def make_spans(
    query_lengths: Sequence[int],
    contexts: Sequence[int],
    tables: np.ndarray | None,
    heads: int,
    kv_heads: int,
) -> Spans:
    """The tensors of a plan, on the host. attention_plan.AttentionPlan explains the arguments."""

    def int32(numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(numbers, np.int32))

    lengths = np.add(contexts, query_lengths)
    starts, key_starts = ([0, *np.cumsum(x)] for x in (query_lengths, lengths))
    if tables is not None:
        return Spans(int32(starts), int32(lengths), int32(tables), kv_heads)
    positions = max(1, TILE_ROWS // (heads // kv_heads))
    return Spans(
        cu_seqlens_q=int32(starts),
        seqused_k=int32(lengths),
        block_table=None,
        kv_heads=kv_heads,
        cu_seqlens_k=int32(key_starts),
        query_tiles=int32(query_tile_table(query_lengths, contexts, kv_heads, positions)),
        key_tiles=int32(key_tile_table(query_lengths, contexts, TILE_KEYS)),
    )


def shared_chunks(
    table: torch.Tensor, lengths: torch.Tensor, chunk_pages: int, page: int, out: SharedChunks
) -> None:
    """Write the work of one token of each of n sequences to `out`, which has 2 n items.

    table [n, J]: the pages of each sequence, `page` keys each. lengths [n]: keys that it has at the least.
    Sequences whose first chunk is full, in the same pages, share all chunks that lie in equal pages. The rest
    goes token by token. All of it is computed where the table lies, and nothing waits for it.
    """
    n, slots = len(table), out.tokens.shape[1]
    i = torch.arange(n, device=table.device)
    filled, first = lengths // (chunk_pages * page), table[:, :chunk_pages]
    group = (first.unsqueeze(1) == first).all(dim=2) & (torch.minimum(filled, filled.unsqueeze(1)) > 0)
    group |= torch.eye(n, dtype=torch.bool, device=table.device)

    def least(values: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
        """Of each row of `members` the least value."""
        return torch.where(members, values, torch.iinfo(torch.int32).max).amin(dim=1)

    equal = (table == table[least(i, group)]).cumprod(dim=1).sum(dim=1) // chunk_pages
    common = torch.where(group.sum(dim=1) > 1, least(torch.minimum(equal, filled), group), 0)
    place = (group & (i < i.unsqueeze(1))).sum(dim=1)
    begins, slot = place - place % slots, place % slots
    item = torch.where(common > 0, least(i, group & (place == begins.unsqueeze(1))), n + i)
    for part, columns in (
        (out.items[:n], (i, torch.zeros_like(i), torch.where((common > 0) & (slot == 0), common, 0))),
        (out.items[n:], (i, common, torch.full_like(i, torch.iinfo(torch.int32).max))),
    ):
        part.copy_(torch.stack(columns, dim=1))
    out.tokens.fill_(-1)
    out.tokens[n:, 0] = i
    out.tokens.index_put_((item, torch.where(common > 0, slot, 0)), i.to(out.tokens.dtype))


def query_tile_table(
    query_lengths: Sequence[int], contexts: Sequence[int], kv_heads: int, positions: int
) -> np.ndarray:
    """Tiles of `positions` queries: [tiles, 4], the programs of a packed forward in their order.

    A row is: the tile's first row in q, its positions, the first one's place in its sequence, and the first
    key of the sequence. The sequences of about one wave of programs come together, and of those the tiles
    with most keys first. With all sequences together, keys and values would leave the L2 cache between two
    programs that read them.
    """
    queries, context = np.asarray(query_lengths, np.int64), np.asarray(contexts, np.int64)
    tiles = -(-queries // positions)
    seq = np.repeat(np.arange(len(queries)), tiles)
    within = (np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * positions
    start, key_start = np.cumsum(queries) - queries, np.cumsum(queries + context) - queries - context
    count = np.minimum(positions, queries[seq] - within)
    first = context[seq] + within
    wave = (np.cumsum(tiles) - tiles)[seq] * kv_heads // _WAVE
    order = np.lexsort((-(first + count), wave))
    return np.stack([start[seq] + within, count, first, key_start[seq]], axis=1)[order]


def key_tile_table(query_lengths: Sequence[int], contexts: Sequence[int], keys: int) -> np.ndarray:
    """Tiles of `keys` keys: [tiles, 6], the programs of a packed backward, those with most queries first.

    A row is: the tile's first row in k, its keys, the first one's place in its sequence, and of the sequence
    the first row in q, the number of queries, and the number of positions before them.
    """
    queries, context = np.asarray(query_lengths, np.int64), np.asarray(contexts, np.int64)
    lengths = queries + context
    tiles = -(-lengths // keys)
    seq = np.repeat(np.arange(len(lengths)), tiles)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * keys
    start, key_start = np.cumsum(queries) - queries, np.cumsum(lengths) - lengths
    count = np.minimum(keys, lengths[seq] - first)
    columns = [key_start[seq] + first, count, first, start[seq], queries[seq], context[seq]]
    order = np.argsort(np.maximum(context[seq], first) - lengths[seq], kind="stable")
    return np.stack(columns, axis=1)[order]
