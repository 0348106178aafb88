"""The sampler's key-value cache, in blocks of KEY_TILE positions, and beside it slots of states.

Each block counts its owners, so that the samples of a prompt share its blocks. A layer with a state
(Sizes.states) has no keys and values. It has a slot for each sequence, which samples copy from their prompt.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from ..kernels.attention import attention_cached
from ..kernels.attention_plan import KEY_TILE, AttentionPlan
from ..kernels.attention_rule import AttentionRule
from ..kernels.attention_tables import SharedChunks, Spans
from ..kernels.backend import on_triton
from ..kernels.decode_heads import CacheSlots
from ..kernels.matmul import UNPACKED, PackedWeights
from ..kernels.passes import Pass
from ..kernels.recurrent_state import AnySegments, DecodedSegments, RecurrentState, Segments
from ..kernels.upload import Tables, upload
from .routing import FREE, Routing
from .sizes import Sizes


class BlockCache:
    """Keys and values of all layers, on the CPU or on `device`.

    data: [layers with keys, blocks * Hkv, 2, KEY_TILE, D] in `dtype` (Decoder.cache_dtype).
    slots: for sequences, in layers with a state. compute: the compute dtype, where `dtype` is another one:
    what a state keeps is not rounded to that of the cache.
    """

    def __init__(
        self,
        config: Sizes,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        slots: int = 0,
        compute: torch.dtype | None = None,
    ):
        self.config, self.blocks = config, blocks
        with_keys = [i for i in range(config.layers) if i not in config.states]
        self._place = {layer: place for place, layer in enumerate(with_keys)}
        self.data = torch.zeros(
            len(with_keys),
            blocks * config.kv_heads,
            2,
            KEY_TILE,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.states = {
            i: RecurrentState(shape, slots, compute or dtype, device) for i, shape in config.states.items()
        }
        self.free_slots = list(range(slots - 1, -1, -1)) if self.states else []
        self._free = list(range(blocks - 1, -1, -1))
        self._owners = [0] * blocks
        self._taken: list[int] = []  # blocks that still hold what an earlier owner wrote

    @staticmethod
    def blocks_for(tokens: int) -> int:
        """The blocks that hold so many positions."""
        return -(-tokens // KEY_TILE)

    @staticmethod
    def bytes_per_block(config: Sizes, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        layers = config.layers - len(config.states)
        return layers * config.kv_heads * 2 * KEY_TILE * config.head_dim * dtype.itemsize

    @staticmethod
    def bytes_per_slot(config: Sizes, compute: torch.dtype) -> int:
        """Memory of one slot over all layers with a state; 0 where there are none. compute: the dtype."""
        return sum(RecurrentState.bytes_per_slot(shape, compute) for shape in config.states.values())

    def take_slot(self) -> int:
        """A slot of zeros for a new sequence. Where no layer has a state it is 0, and means nothing."""
        if not self.states:
            return 0
        slot = self.free_slots.pop()
        for state in self.states.values():
            state.zero(slot)
        return slot

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let sequences go on as others would, from the same tokens."""
        for state in self.states.values():
            state.copy(sources, targets)

    def release_slot(self, slot: int) -> None:
        """Nobody goes on with this sequence."""
        if self.states:
            self.free_slots.append(slot)

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks and fill them with zeros."""
        blocks = self.take(n)
        self.zero_taken()
        return blocks

    def take(self, n: int) -> list[int]:
        """Take n free blocks. `zero_taken` must follow before anything is written to the cache."""
        blocks = [self._free.pop() for _ in range(n)]
        for b in blocks:
            self._owners[b] = 1
        self._taken += blocks
        return blocks

    def zero_taken(self) -> None:
        """Fill with zeros all blocks that were taken.

        A masked key has weight 0.0, and 0.0 times a NaN is a NaN. So nothing of an earlier owner may stay.
        """
        if self._taken:
            (index,) = upload(self.data.device, torch.tensor(self._taken))
            self.data.view(len(self.data), self.blocks, -1).index_fill_(1, index, 0)
            self._taken = []

    def clear(self, slots: Sequence[tuple[int, int]]) -> None:
        """Fill single positions with zeros, each given by its block and its place in it: see zero_taken."""
        if slots:
            block, offset = upload(self.data.device, *torch.tensor(slots).unbind(1))
            sizes = len(self.data), self.blocks, self.config.kv_heads, 2, KEY_TILE, -1
            self.data.view(torch.uint8).view(sizes)[:, block, :, :, offset] = 0

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Add one owner to each block."""
        for b in blocks:
            self._owners[b] += 1
        return list(blocks)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks over all layers.

        Each sample needs its own copy of a prompt's last block, where that block is only partly filled.
        """
        by_block = self.data.view(len(self.data), self.blocks, -1)
        source, target = upload(self.data.device, *map(torch.tensor, (sources, targets)))
        by_block.index_copy_(1, target, by_block.index_select(1, source))

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block; a block without owners is free."""
        for b in blocks:
            self._owners[b] -= 1
            if not self._owners[b]:
                self._free.append(b)

    def owners(self, block: int) -> int:
        """How many owners a block has."""
        return self._owners[block]

    def slots(self, layer: int, block: torch.Tensor, offset: torch.Tensor) -> CacheSlots:
        """The positions (block, offset) of a layer, both [T] int64.

        Where the cache is narrower than keys and values, they were rounded to its dtype before (Decoder), so
        the cache loses nothing.
        """
        return CacheSlots(self.layer(layer), block, offset)

    def layer(self, layer: int) -> torch.Tensor:
        """The key tiles of a layer, [blocks * Hkv, 2, KEY_TILE, D]."""
        return self.data[self._place[layer]]

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return len(self._free)


class CachedContext:
    """New tokens of several sequences against the cache: positions, where to write, and the attention plan.

    lengths [S]: new tokens of each sequence.
    contexts [S]: tokens of each sequence that are already in the cache.
    block_lists: the blocks of each sequence, long enough for both.
    packed: see matmul.pack_weights. routing: of the new tokens' rows. slots [S]: of each sequence, where a
    layer has a state.
    """

    def __init__(
        self,
        cache: BlockCache,
        lengths: Sequence[int],
        contexts: Sequence[int],
        block_lists: Sequence[Sequence[int]],
        packed: PackedWeights = UNPACKED,
        routing: Routing = FREE,
        slots: Sequence[int] = (),
    ):
        config, self.routing = cache.config, routing
        self._sequences = lengths, contexts, slots
        self.in_pass = Pass(packed=packed)
        length, context = np.asarray(lengths, np.int64), np.asarray(contexts, np.int64)
        tables = np.zeros((len(block_lists), max(len(b) for b in block_lists)), np.int64)
        for row, blocks in zip(tables, block_lists, strict=True):
            row[: len(blocks)] = blocks
        seq = np.repeat(np.arange(len(length)), length)
        within = np.arange(len(seq)) - np.repeat(np.cumsum(length) - length, length)
        position = context[seq] + within
        self.positions = torch.from_numpy(position)
        block_and_offset = np.stack([tables[seq, position // KEY_TILE], position % KEY_TILE])
        self._block_and_offset = torch.from_numpy(block_and_offset)
        self._cache = cache
        self._plan = AttentionPlan(lengths, contexts, tables, config.heads, config.kv_heads)

    @cached_property
    def segments(self) -> Segments:
        return Segments(*self._sequences)

    def state(self, layer: int) -> RecurrentState:
        return self._cache.states[layer]

    @property
    def tables(self) -> list[Tables]:
        segments = [self.segments] if self._cache.states else []
        return [self._plan, *self.routing.tables, *segments, self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self.positions, self._block_and_offset]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self.positions, self._block_and_offset = tensors

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v [T, Hkv, D] to the cache, then attend from q [T, Hq, D]."""
        self._cache.slots(layer, *self._block_and_offset).write(k, v)
        return attention_cached(q, self._cache.layer(layer), self._plan, scale, rule, sinks)

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._cache.slots(self._cache.config.layers - 1, *self._block_and_offset).write(k, v)


class DecodeContext:
    """One new token of each of n sequences. On Triton nothing here waits for the GPU or depends on the host.

    So the launches of a forward are the same each time, and a CUDA graph can replay them.

    positions [n] int64: the position of each new token. table [n, J] int32: the blocks of each sequence.
    packed: see matmul.pack_weights. routing: of the new tokens' rows.
    shared: the chunks that sequences share, where attention has chunks; for Triton only.
    slots [n] int64: of each sequence, where a layer has a state.
    """

    tables: Sequence[Tables] = ()  # all is on the device

    def __init__(
        self,
        cache: BlockCache,
        positions: torch.Tensor,
        table: torch.Tensor,
        packed: PackedWeights = UNPACKED,
        routing: Routing = FREE,
        shared: SharedChunks | None = None,
        slots: torch.Tensor | None = None,
    ):
        self._slots = slots
        n, config, self.routing = len(positions), cache.config, routing
        self.in_pass = Pass(packed=packed)
        self.positions, self._cache = positions, cache
        self._block = table.gather(1, (positions // KEY_TILE).unsqueeze(1)).squeeze(1).long()
        self._offset = positions % KEY_TILE
        self._plan: AttentionPlan | Spans
        if on_triton(cache.data):
            starts = torch.arange(n + 1, dtype=torch.int32, device=positions.device)
            self._plan = Spans(starts, (positions + 1).int(), table, config.kv_heads, shared=shared)
        else:
            self._plan = AttentionPlan(
                [1] * n, positions.tolist(), table.numpy().astype(np.int64), config.heads, config.kv_heads
            )

    @cached_property
    def segments(self) -> AnySegments:
        if on_triton(self._cache.data):
            return DecodedSegments(self.positions, self._slots)
        return Segments([1] * len(self.positions), self.positions.tolist(), self._slots.tolist())

    def state(self, layer: int) -> RecurrentState:
        return self._cache.states[layer]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v [n, Hkv, D] to the cache, then attend from q [n, Hq, D]."""
        self.slots(layer).write(k, v)
        return self.attend_cached(layer, q, scale, rule, sinks)

    def slots(self, layer: int) -> CacheSlots:
        """Where the keys and values of the new tokens go."""
        return self._cache.slots(layer, self._block, self._offset)

    def attend_cached(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `attend`, after k and v of the new tokens were written."""
        return attention_cached(q, self._cache.layer(layer), self._plan, scale, rule, sinks)
