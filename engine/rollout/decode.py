"""Decoding turns: each turn draws one token for each row of a table that stays where it is in memory.

A turn reads and writes tensors of fixed addresses only, and the host decides nothing in it. So on a GPU the
launches of a turn are captured in a CUDA graph, one for each number of rows (`bucket`), and replayed. The
host looks at what was drawn every LOOK_EVERY turns, and launches the next turns before it reads a look. What
a row drew past its end is dropped.

A row that is done, or that pads a bucket, goes on like any other row, but its position stays. A padding row
has a page of its own. By the law no row changes the bits of another one.

Shapes: n rows of a turn; V vocabulary; J pages of a row; L turns between two looks.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.attention_plan import KEY_TILE
from ...kernels.attention_tables import SharedChunks, shared_chunks
from ...kernels.backend import on_triton
from ...kernels.draw import draw_tokens
from ...kernels.logprob import chunk_rows, head_logits
from ...kernels.matmul import UNPACKED, PackedWeights
from ...kernels.philox import Stream
from ...kernels.truncation import logit_offset
from ...kernels.uniforms import uniforms
from ...kernels.upload import upload
from ...model.cache import BlockCache, DecodeContext
from ...model.decoder import Decoder
from ...model.routing import FREE, RecordedRouting, id_dtype
from .prefix_cache import PrefixCache
from .types import DrawParams, RngKey, logit_noise

# Turns between two looks on a GPU. A turn of 64 rows of a 0.6B takes 2 to 3 ms on an H100, and a look costs a
# wait. A completion that ends between two looks draws tokens in vain: up to LOOK_EVERY - 1, and LOOK_EVERY in
# the turns that were launched before its end was read.
LOOK_EVERY = 8
# Rows of a graph are a power of two up to this number, and a multiple of it above.
_ROWS = 64


class Row(NamedTuple):
    """A completion at one turn."""

    token: int  # the last token that is known, whose position has no keys yet
    position: int  # of this token
    drawn: int  # tokens of the trajectory that were drawn before
    last: int  # the completion ends when so many tokens of the trajectory are drawn
    rng_key: RngKey
    pages: Sequence[int]  # blocks of the cache
    slot: int = 0  # of the cache, where a layer has a state


class DrawnToken(NamedTuple):
    """A token that a row drew."""

    id: int
    logprob: float
    experts: np.ndarray | None  # [L, k] of the row that was read, where they are asked for


class Drawn(NamedTuple):
    """What the rows drew in some turns, [turns, n] each."""

    ids: np.ndarray
    logprobs: np.ndarray  # fp32; NaN where the logits were not finite
    # [turns, n, L, k] of the rows that were read, where they are asked for (DrawParams.experts)
    experts: np.ndarray | None = None

    def by_row(self) -> list[list[DrawnToken]]:
        """What each row drew, turn by turn."""
        turns, n = self.ids.shape
        experts = [[None] * turns] * n if self.experts is None else self.experts.swapaxes(0, 1)
        columns = zip(self.ids.T.tolist(), self.logprobs.T.tolist(), experts, strict=True)
        return [[*map(DrawnToken, *column)] for column in columns]


class Look:
    """Copies of tensors on their way to the host. Later turns may be launched."""

    def __init__(self, *columns: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        if columns[0].is_cuda:
            self._columns = [
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                for x in columns
            ]
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._columns = [x.to("cpu", copy=True) for x in columns]

    def arrays(self) -> list[np.ndarray]:
        """Wait for what made the tensors, and for nothing later."""
        if self._event is not None:
            self._event.synchronize()
        return [column.numpy() for column in self._columns]

    def read(self) -> Drawn:
        """The columns as what rows drew in some turns."""
        return Drawn(*self.arrays())


class _Field(IntEnum):
    """Lines of DecodeRows.state."""

    TOKEN = 0
    POSITION = 1
    DONE = 2
    LAST = 3
    SLOT = 4
    # The counter of the row's uniform number. Its first word is the number of tokens drawn before.
    DRAWN = 5
    SAMPLE = 6
    PROMPT = 7
    STEP = 8


def bucket(rows: int) -> int:
    """The rows of the graph that serves `rows` rows."""
    return 1 << (rows - 1).bit_length() if rows <= _ROWS else -(-rows // _ROWS) * _ROWS


class DecodeMemory:
    """The tensors that turns read and write: the cache, and a line for each row.

    prefix_cache: who gives out the cache's blocks, and keeps some for later calls.

    rows: the largest number of rows of a turn. pages: of a row. blocks: of the cache, for keys and values.
    """

    def __init__(self, decoder: Decoder, rows: int, pages: int, blocks: int):
        device = decoder.device
        self.padded = on_triton(decoder.flat)
        rows = bucket(rows) if self.padded else rows
        # One slot for each sample that runs, and one for a prefix whose samples wait.
        self.cache = BlockCache(
            decoder.config,
            blocks + self.padded,
            decoder.cache_dtype,
            device,
            slots=rows + 1 + self.padded,
            compute=decoder.dtype,
        )
        self.blocks, self.padding_page, self.padding_slot = blocks, 0, 0
        if self.padded:
            self.padding_page, self.padding_slot = self.cache.allocate(1)[0], self.cache.take_slot()
        self.prefix_cache = PrefixCache(self.cache)
        self.state = torch.zeros(len(_Field), rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.ids = torch.zeros(LOOK_EVERY, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(LOOK_EVERY, rows, dtype=torch.float32, device=device)
        self.experts: torch.Tensor | None = None  # [LOOK_EVERY, rows, L, k] in a model with experts
        if (c := decoder.config.experts) is not None:
            shape = LOOK_EVERY, rows, len(c.layers), c.per_token
            self.experts = torch.zeros(shape, dtype=id_dtype(c.number), device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.shared: SharedChunks | None = None  # of attention over chunks
        if self.padded and decoder.numerics.attention.chunk:
            from ...kernels.attention_split_triton import no_chunks

            c = decoder.config
            self.shared = no_chunks(rows, c.heads, c.kv_heads, decoder.dtype, device)
        self._graph_pool: tuple[int, int] | None = None

    def holds(self, rows: int, pages: int, blocks: int) -> bool:
        """Whether this memory is large enough."""
        return rows <= self.table.shape[0] and pages <= self.table.shape[1] and blocks <= self.blocks

    def grown(self, rows: int, pages: int, blocks: int) -> tuple[int, int, int]:
        """The sizes of a memory that holds what this one holds and so many rows, pages and blocks."""
        return max(rows, self.table.shape[0]), max(pages, self.table.shape[1]), max(blocks, self.blocks)

    @property
    def graph_pool(self) -> tuple[int, int]:
        """The memory that all graphs share: one runs at a time."""
        self._graph_pool = self._graph_pool or torch.cuda.graph_pool_handle()
        return self._graph_pool


class DecodeRows:
    """Turns with one kind of generation, over a DecodeMemory that others may use between two calls.

    The graphs read the weights, the memory and the tensors of this object where they lie.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: DecodeMemory,
        draw_params: DrawParams,
        seed: int,
        stream: Stream,
    ):
        self.decoder, self.memory, self.draw_params = decoder, memory, draw_params
        self._seed, self._stream = seed, stream
        stop_ids = torch.tensor(sorted(draw_params.stop_ids), dtype=torch.int64)
        (self._stop_ids,) = upload(decoder.device, stop_ids)
        self._offset = logit_offset(draw_params.sampling_params, decoder.config.vocab_size, decoder.device)
        # By the number of rows and the columns of their table.
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._columns = memory.table.shape[1]
        self.packed = UNPACKED  # copies of the weights as they are during one `generate` call

    def start(self, packed: PackedWeights) -> None:
        """Begin a `generate` call with the weights as they are now, and their packed copies."""
        self._rows, self.packed = [], packed
        lm_head, flat = self.decoder.logits_weight(), self.decoder.flat
        if not self._graphs or flat.data_ptr() != self._flat_address:
            self._graphs.clear()
            self._lm_head, self._flat_address = lm_head, flat.data_ptr()
        elif lm_head.data_ptr() != self._lm_head.data_ptr():  # a copy in another dtype
            self._lm_head.copy_(lm_head)

    def stop(self) -> None:
        """End a `generate` call. The weights may change now, so their packed copies are dropped."""
        self.packed = UNPACKED

    @property
    def look_every(self) -> int:
        """Turns of one `run` at most. Where no GPU is waited for, each turn is looked at."""
        return LOOK_EVERY if self.memory.padded else 1

    @property
    def names_experts(self) -> bool:
        """Whether the experts of all rows are asked for."""
        return self.draw_params.experts and self.decoder.config.experts is not None

    def routing(self) -> RecordedRouting | None:
        """The routing of a forward that keeps the experts of its rows; None where nobody asks for them."""
        return RecordedRouting(self.decoder.config.experts) if self.names_experts else None

    def first(self, rows: Sequence[Row], hidden: torch.Tensor) -> Drawn:
        """Draw the first token of each row from the hidden states [n, D] of its last known token.

        It names no experts: whoever read these tokens knows them.
        """
        self._write(rows, len(rows))
        self.memory.turn.zero_()
        self._draw(len(rows), hidden, self._noise())
        return Look(self.memory.ids[:1, : len(rows)], self.memory.logprobs[:1, : len(rows)]).read()

    def load(self, rows: Sequence[Row]) -> None:
        """The rows of the next turns."""
        n = bucket(len(rows)) if self.memory.padded else len(rows)
        self._columns = self._columns_of(rows)
        if self._captured and (n, self._columns) not in self._graphs:
            self._capture(n)
        self._write(rows, n)

    def _columns_of(self, rows: Sequence[Row]) -> int:
        """The columns of the table of pages that attention reads.

        Where attention has chunks, rows that stay within one have nothing to join, and graphs of their own.
        """
        one_chunk, pages = self.decoder.numerics.attention.chunk // KEY_TILE, self.memory.table.shape[1]
        longest = max(row.position + 1 + row.last - row.drawn for row in rows)
        return one_chunk if longest <= one_chunk * KEY_TILE and one_chunk < pages else pages

    @property
    def looks_ahead(self) -> int:
        """Looks whose turns are launched before an earlier look is read, so that a GPU does not wait."""
        return 1 if self.memory.padded else 0

    def run(self, turns: int) -> Look:
        """Launch `turns` turns, at most look_every, which draw a token each for each row."""
        n = bucket(len(self._rows)) if self.memory.padded else len(self._rows)
        self.memory.turn.zero_()
        for _ in range(turns):
            if self._captured:
                self._graphs[n, self._columns].replay()
            else:
                self._turn(n, self._noise())
            self._turns += 1
        return self._look(turns)

    def _write(self, rows: Sequence[Row], n: int) -> None:
        """Write the rows, and padding up to n rows, to the memory."""
        memory = self.memory
        state = np.zeros((len(_Field), n), np.int64)
        table = np.full((n, memory.table.shape[1]), memory.padding_page, np.int32)
        state[_Field.DONE, len(rows) :], state[_Field.SLOT, len(rows) :] = 1, memory.padding_slot
        for i, (token, position, drawn, last, key, pages, slot) in enumerate(rows):
            numbers = token, position, 0, last, slot, drawn  # as in _Field
            state[:, i] = *numbers, key.sample, key.prompt, key.step
            table[i, : len(pages)] = pages
        tensors = upload(memory.state.device, torch.from_numpy(state), torch.from_numpy(table))
        memory.state[:, :n], memory.table[:n] = tensors
        if memory.shared is not None:
            # Rows that share pages have all their keys in the cache, so a chunk that is full stays as it is.
            lengths, chunk = memory.state[_Field.POSITION, :n] + 1, self.decoder.numerics.attention.chunk
            shared_chunks(memory.table[:n], lengths, chunk // KEY_TILE, KEY_TILE, memory.shared.of_rows(n))
        self._rows, self._turns = list(rows), 0

    def _look(self, turns: int) -> Look:
        """What the rows drew in the last turns."""
        n, memory = len(self._rows), self.memory
        experts = [memory.experts[:turns, :n]] if self.names_experts else []
        return Look(memory.ids[:turns, :n], memory.logprobs[:turns, :n], *experts)

    @property
    def _captured(self) -> bool:
        """Whether a graph replays the turns. The noise of an ablation is made on the host."""
        return self.decoder.device.type == "cuda" and not self.draw_params.logit_noise

    def _capture(self, n: int) -> None:
        """Make the graph of n rows. All rows are padding meanwhile: the turns before it compile kernels."""
        memory = self.memory
        self._write([], n)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                memory.turn.zero_()
                self._turn(n)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory.graph_pool):
            self._turn(n)
        self._graphs[n, self._columns] = graph

    def _turn(self, n: int, noise: torch.Tensor | None = None) -> None:
        """One token for each of n rows. noise [n, V] fp32 is added to the logits."""
        memory, state = self.memory, self.memory.state[:, :n]
        routing = self.routing()
        shared = None if memory.shared is None else memory.shared.of_rows(n)
        context = DecodeContext(
            memory.cache,
            state[_Field.POSITION],
            memory.table[:n, : self._columns],
            self.packed,
            routing or FREE,
            shared,
            state[_Field.SLOT],
        )
        hidden = self.decoder.hidden(state[_Field.TOKEN], context)
        if routing:
            memory.experts[:, :n].index_copy_(0, memory.turn, routing.taken().unsqueeze(0))
        self._draw(n, hidden, noise)

    def _draw(self, n: int, hidden: torch.Tensor, noise: torch.Tensor | None) -> None:
        """One token for each of n rows, from its hidden state [n, D]."""
        memory, params, state = self.memory, self.draw_params, self.memory.state[:, :n]
        hidden = hidden.to(self._lm_head.dtype)
        u = uniforms(state[_Field.DRAWN :], self._seed, self._stream)
        rows, order = chunk_rows(self.decoder.config.vocab_size, self.decoder.device), self.decoder.numerics
        for a in range(0, n, rows):
            b = min(a + rows, n)
            packed, (tiles, leaves) = self.packed.get(self._lm_head), (order.tiles, order.leaves)
            logits = head_logits(hidden[a:b], self._lm_head, self.decoder.config.head.cap, packed, tiles)
            ids, logp = draw_tokens(
                leaves.whole_rows(logits),
                u[a:b],
                params.sampling_params,
                None if noise is None else noise[a:b],
                self._offset,
                leaves.alone,
            )
            for column, values in ((memory.ids, ids), (memory.logprobs, logp)):
                column[:, a:b].index_copy_(0, memory.turn, values.unsqueeze(0))
            state[_Field.TOKEN, a:b] = ids
        memory.turn += 1
        self._advance(state)

    def _advance(self, state: torch.Tensor) -> None:
        """Count the tokens that the turn has drawn. state [fields, n]."""
        done, drawn = state[_Field.DONE], state[_Field.DRAWN]
        drawn += 1
        ended = (state[_Field.TOKEN].unsqueeze(1) == self._stop_ids).any(dim=1)
        done |= ended | (drawn >= state[_Field.LAST])
        state[_Field.POSITION] += 1 - done

    def _noise(self) -> torch.Tensor | None:
        """The noise of the logits [n, V] in this turn; None without noise."""
        scale = self.draw_params.logit_noise
        if not scale:
            return None
        counters = np.array(
            [(r.drawn + self._turns, r.rng_key.sample, r.rng_key.prompt, r.rng_key.step) for r in self._rows]
        )
        noise = logit_noise(self._seed, counters, self.decoder.config.vocab_size)
        return upload(self.decoder.device, noise)[0] * scale
