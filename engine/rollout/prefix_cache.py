"""The prefix cache of the native sampler: full blocks of keys and values, found by their token ids.

A completion that ends may leave its full blocks here. The next turn of its trajectory begins with the same
ids, so it takes these blocks and reads only what comes after them. By the law the keys and values of a token
depend on the ids up to it and on the weights. So it decides no bit whether a block was read or drawn, or for
which trajectory.

A block is found by the entry of the block before it and by its own KEY_TILE ids. The ids themselves are
compared, not a hash of them. Entries are numbered, and no number comes back: where a block was given back,
what followed it is found by nobody, and its room is used again like that of any other entry.

Blocks that nobody but this cache has are room for others. The least recently used one is given back first.
"""

from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from typing import NamedTuple

import numpy as np

from ...kernels.attention_plan import KEY_TILE
from ...model.cache import BlockCache

# The entry before the first block of a sequence.
_START = 0


class _Place(NamedTuple):
    """What a block is found by."""

    before: int  # the number of the entry before it
    ids: tuple[int, ...]  # [KEY_TILE]


class _Entry(NamedTuple):
    number: int
    place: _Place
    block: int
    experts: np.ndarray | None = None  # [KEY_TILE, L, k] of its ids, where they are known


class PrefixCache:
    """Full blocks of `cache`, which also has blocks that are not here. It is one of a block's owners."""

    def __init__(self, cache: BlockCache):
        self._cache, self._numbers = cache, count(_START + 1)
        self._entries: dict[_Place, _Entry] = {}
        self._of_block: dict[int, _Entry] = {}
        # Blocks that have no other owner, the least recently used first. The values mean nothing.
        self._idle: dict[int, None] = {}

    def __len__(self) -> int:
        """The number of blocks that are kept."""
        return len(self._of_block)

    def find(self, ids: Sequence[int], with_experts: bool = False) -> list[int]:
        """The kept blocks that hold the beginning of these ids, as many as there are. They may be none.

        The last id is never among theirs: somebody must read it, because its hidden state draws.
        with_experts: only blocks whose experts are known, up to the first other one.
        """
        chain = self._chain(ids[:-1])
        if with_experts:
            chain = takewhile(lambda entry: entry.experts is not None, chain)
        return [entry.block for entry in chain]

    def experts(self, blocks: Sequence[int]) -> list[np.ndarray]:
        """The experts of the ids of each of these kept blocks, which `find` has found with their experts."""
        return [self._of_block[b].experts for b in blocks]

    def free_beside(self, blocks: Sequence[int]) -> int:
        """The number of blocks that can be allocated while these kept blocks stay."""
        return self._cache.free + len(self._idle) - sum(b in self._idle for b in blocks)

    def take(self, blocks: Sequence[int]) -> list[int]:
        """Add one owner to kept blocks."""
        for b in blocks:
            self._idle.pop(b, None)
        return self._cache.share(blocks)

    def take_new(self, n: int) -> list[int]:
        """Take n blocks; kept blocks that nobody uses are given back where too few are free.

        The cache's `zero_taken` must follow before anything is written to it.
        """
        while self._cache.free < n:
            self._drop(self._of_block[next(iter(self._idle))])
        return self._cache.take(n)

    def keep(self, ids: Sequence[int], blocks: Sequence[int], experts: np.ndarray | None = None) -> None:
        """Keep the full blocks of a sequence. Its owner still has them, and nobody writes to them any more.

        ids: those whose keys and values are in the blocks, from the first one on. experts [len(ids), L, k]:
        theirs, where they are known.
        """
        kept = self._chain(ids)
        before = kept[-1].number if kept else _START
        for i in range(len(kept), len(ids) // KEY_TILE):
            part = slice(i * KEY_TILE, (i + 1) * KEY_TILE)
            block, place = blocks[i], _Place(before, tuple(ids[part]))
            if block in self._of_block:  # nobody finds it: the entry before it was given back
                del self._entries[self._of_block[block].place]
            else:
                self._cache.share([block])
            entry = _Entry(next(self._numbers), place, block, None if experts is None else experts[part])
            self._entries[place] = self._of_block[block] = entry
            before = entry.number

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block of a sequence. The last of its kept blocks is given back first."""
        self._cache.release(blocks)
        for b in reversed(blocks):
            if b in self._of_block and self._cache.owners(b) == 1:
                self._idle[b] = None

    def clear(self) -> None:
        """Give all blocks back. Nobody may use one."""
        assert len(self._idle) == len(self._of_block), "a kept block is in use"
        for entry in list(self._entries.values()):
            self._drop(entry)

    def _chain(self, ids: Sequence[int]) -> list[_Entry]:
        """The entries of the full blocks of these ids, up to the first one that is missing."""
        chain: list[_Entry] = []
        for block_ids in _full_blocks(ids):
            entry = self._entries.get(_Place(chain[-1].number if chain else _START, block_ids))
            if entry is None:
                break
            chain.append(entry)
        return chain

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.place], self._of_block[entry.block], self._idle[entry.block]
        self._cache.release([entry.block])


def _full_blocks(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for end in range(KEY_TILE, len(ids) + 1, KEY_TILE):
        yield tuple(ids[end - KEY_TILE : end])
