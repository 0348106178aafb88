"""What a gated delta net keeps of a sequence, and how the new tokens of sequences lie in a forward.

A sequence is cut into chunks of CHUNK tokens and tiles of TILE tokens. Both count from its first token, never
from the first token of a call. Between two calls a sequence leaves a slot behind (RecurrentState): the last
inputs of its convolution, the state at the start of its open chunk, and the rows of that chunk.

Shapes: S sequences, T new tokens, C channels of the convolution, Hk key heads, H value heads, K and V their
widths.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from .grad import accumulate_dtype
from .upload import upload

CHUNK, TILE = 64, 16
TAPS = 4  # of the convolution


class StateShape(NamedTuple):
    """The sizes of a gated delta net."""

    key_heads: int
    heads: int
    K: int
    V: int

    @property
    def widths(self) -> list[int]:
        """Channels of queries, keys and values."""
        return [self.key_heads * self.K, self.key_heads * self.K, self.heads * self.V]

    @property
    def channels(self) -> int:
        """C."""
        return sum(self.widths)

    def backward_bytes(self, rows: int, sequences: int) -> int:
        """The memory of a backward on a GPU (delta_bwd_triton.py). Each sequence has whole chunks."""
        pairs, states = 4 * CHUNK + TILE, 2 * self.K * self.V // CHUNK
        numbers = 2 * (self.K + self.V) + pairs + states + 22  # the last are of gates, some in fp64
        row_bytes = 4 * (self.heads * numbers + 2 * self.key_heads * self.K + self.channels)
        return (rows + CHUNK * sequences) * row_bytes


class RecurrentState:
    """The slots of one layer. A new sequence begins with a slot of zeros.

    conv [slots, TAPS - 1, C]: inputs of the convolution; kv [slots, CHUNK, Hk K + H V]: what it gave for keys
    and values. Both are in the compute dtype. The others are in fp32: start [slots, H, K, V], g and beta
    [slots, CHUNK, H], u [slots, CHUNK, H, V]. Rows of a chunk that are still to come are 0 on a
    CPU, and are read by nobody on a GPU.
    """

    def __init__(self, shape: StateShape, slots: int, dtype: torch.dtype, device: torch.device | None = None):
        self.tensors = {
            name: torch.zeros(slots, *size, dtype=kind, device=device)
            for name, (size, kind) in self.sizes(shape, dtype).items()
        }

    @staticmethod
    def sizes(s: StateShape, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The size of each tensor of a slot, and its dtype, by name."""
        acc = accumulate_dtype(dtype)
        return {
            "conv": ((TAPS - 1, s.channels), dtype),
            "kv": ((CHUNK, sum(s.widths[1:])), dtype),
            "start": ((s.heads, s.K, s.V), acc),
            "g": ((CHUNK, s.heads), acc),
            "beta": ((CHUNK, s.heads), acc),
            "u": ((CHUNK, s.heads, s.V), acc),
        }

    @classmethod
    def bytes_per_slot(cls, shape: StateShape, dtype: torch.dtype) -> int:
        """Memory of one slot."""
        sizes = cls.sizes(shape, dtype).values()
        return sum(torch.Size(size).numel() * kind.itemsize for size, kind in sizes)

    def zero(self, slot: int) -> None:
        """Let a new sequence have this slot."""
        for x in self.tensors.values():
            x[slot] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots."""
        device = self.tensors["start"].device
        source, target = upload(device, *(torch.tensor(x, dtype=torch.int64) for x in (sources, targets)))
        for x in self.tensors.values():
            x.index_copy_(0, target, x.index_select(0, source))


class SegmentTables(NamedTuple):
    """New tokens on a device, as the Triton kernels read them: all in int32.

    sequences [S, 5]: the first row, how many tokens, the tokens of the open chunk that were read before, the
    first of its chunks here, and its slot. chunks [n]: the sequence of each chunk; the open one is a
    sequence's first. tokens [T, 2]: the place in the call, and the sequence, of each token.
    """

    sequences: torch.Tensor
    chunks: torch.Tensor
    tokens: torch.Tensor


class Left(NamedTuple):
    """What sequences leave behind in training, where it has a gradient. RecurrentState says what each is.

    conv [S, TAPS - 1, C], kv [S, CHUNK, Hk K + H V], g and beta [S, CHUNK, H], start [S, H, K, V].
    """

    conv: torch.Tensor
    kv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    start: torch.Tensor

    @classmethod
    def nothing(cls, shape: StateShape, sequences: int, dtype: torch.dtype) -> "Left":
        """What is there before the first token."""
        tensors = RecurrentState(shape, sequences, dtype).tensors
        return cls(*(tensors[name] for name in cls._fields))

    @classmethod
    def of_rows(cls, shape: StateShape, *flat: torch.Tensor) -> "Left":
        """The tensors from rows of all their elements, [S, ...] each."""
        sizes = RecurrentState.sizes(shape, flat[0].dtype)
        return cls(*(x.view(len(x), *sizes[name][0]) for name, x in zip(cls._fields, flat, strict=True)))


class Segments:
    """The new tokens of sequences, packed one after another.

    lengths [S]: how many. before [S]: tokens of each sequence that were read before; slots [S]: where
    RecurrentState has what they left. Both are None for whole sequences.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        before: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
    ):
        self.lengths = torch.tensor(lengths)
        self.opened = torch.tensor(before or [0] * len(lengths)) % CHUNK  # tokens of the open chunk
        self.slots = None if slots is None else torch.tensor(slots)
        starts = self.lengths.cumsum(0) - self.lengths
        self.sequence = torch.arange(len(lengths)).repeat_interleave(self.lengths)  # [T], of each token
        self.within = torch.arange(len(self.sequence)) - starts[self.sequence]  # [T], its place in the call

    @property
    def count(self) -> int:
        """T."""
        return len(self.within)

    def on(self, device: torch.device) -> SegmentTables:
        """The tables of the Triton kernels, made once for each device."""
        if device not in self._tables:
            self.arrived(device, upload(device, *self.host_tensors))
        return self._tables[device]

    @property
    def host_tensors(self) -> SegmentTables:
        counts = (self.opened + self.lengths + CHUNK - 1) // CHUNK
        places = torch.arange(len(counts)) if self.slots is None else self.slots
        starts, chunks = (x.cumsum(0) - x for x in (self.lengths, counts))
        columns = torch.stack([starts, self.lengths, self.opened, chunks, places], 1)
        sequences = torch.arange(len(counts)).repeat_interleave(counts)
        tokens = torch.stack([self.within, self.sequence], 1)
        return SegmentTables(*(x.int() for x in (columns, sequences, tokens)))

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._tables[device] = SegmentTables(*tensors)

    @cached_property
    def _tables(self) -> dict[torch.device, SegmentTables]:
        return {}

    @cached_property
    def taps(self) -> torch.Tensor:
        """The rows that each token's convolution reads, [TAPS, T], the oldest first.

        They count from S (TAPS - 1) rows of history, which stand before the T rows of the call.
        """
        back = torch.arange(TAPS - 1, -1, -1).unsqueeze(1)
        history = len(self.lengths) * (TAPS - 1)
        row = torch.arange(len(self.within)) - back + history
        place = self.within - back  # in the call; negative in the history
        return torch.where(place < 0, self.sequence * (TAPS - 1) + (TAPS - 1) + place, row)

    @cached_property
    def readers(self) -> torch.Tensor:
        """The tokens whose convolution reads a token's row by each tap, [TAPS, T]; T where there is none."""
        ahead = torch.arange(TAPS - 1, -1, -1).unsqueeze(1)
        T = len(self.within)
        return torch.where(self.within + ahead < self.lengths[self.sequence], torch.arange(T) + ahead, T)

    @cached_property
    def last_rows(self) -> torch.Tensor:
        """The rows that the next call's convolution reads, [S, TAPS - 1], counted as those of `taps`."""
        S, n = len(self.lengths), TAPS - 1
        place = self.lengths.unsqueeze(1) - n + torch.arange(n)
        row = (self.lengths.cumsum(0) - self.lengths).unsqueeze(1) + place + S * n
        return torch.where(place < 0, torch.arange(S).unsqueeze(1) * n + n + place, row)

    @cached_property
    def chunks(self) -> int:
        """The most chunks of a sequence, from its open one on."""
        return -(-int((self.opened + self.lengths).max()) // CHUNK)

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """The first and the end of the tiles that the new tokens of any sequence lie in."""
        end = int((self.opened + self.lengths).max())
        return int(self.opened.min()) // TILE, -(-end // TILE)

    @cached_property
    def _places(self) -> torch.Tensor:
        """The row of each token in a grid [S, chunks CHUNK], flat, [T]."""
        return self.sequence * self.chunks * CHUNK + self.opened[self.sequence] + self.within

    def on_grid(self, x: torch.Tensor, open_rows: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of x [T, ...] in their chunks, [S, chunks CHUNK, ...]; 0 where there is no token.

        open_rows [S, CHUNK, ...]: those of the open chunks, which were read before.
        """
        grid = x.new_zeros(len(self.lengths), self.chunks * CHUNK, *x.shape[1:])
        if open_rows is not None:
            grid[:, :CHUNK] = open_rows
        grid.flatten(0, 1)[self._places] = x
        return grid

    def from_grid(self, grid: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The rows of the new tokens, [T, ...]. grid [S, rows, ...]: its rows count from row `first`."""
        rows = self.opened[self.sequence] + self.within - first
        return grid.flatten(0, 1)[self.sequence * grid.shape[1] + rows]

    def open_rows(self, grid: torch.Tensor) -> torch.Tensor:
        """The rows of grid [S, rows, ...] in the chunk that is open after the call, [S, CHUNK, ...].

        Rows that are still to come are 0. After a full chunk there are none.
        """
        index, live = self._open_places
        kept = grid[torch.arange(len(index)).unsqueeze(1), index]
        kept[~live] = 0
        return kept

    def from_open_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, CHUNK, ...] in the places of open_rows, [S, chunks CHUNK, ...]; 0 elsewhere."""
        grid = x.new_zeros(len(x), self.chunks * CHUNK, *x.shape[2:])
        sequence, row = self._open_places[1].nonzero(as_tuple=True)
        grid[sequence, self._open_places[0][sequence, row]] = x[sequence, row]
        return grid

    @cached_property
    def _open_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The grid's row of each row of the chunk that is open after the call, and whether it is there."""
        (chunk, left), row = self.ends, torch.arange(CHUNK)
        index, live = chunk.unsqueeze(1) * CHUNK + row, row < left.unsqueeze(1)
        return index.where(live, torch.zeros_like(index)), live

    @cached_property
    def history_readers(self) -> torch.Tensor:
        """As `readers`, of the S (TAPS - 1) rows of history, [TAPS, S (TAPS - 1)]."""
        tap, T = torch.arange(TAPS).view(-1, 1, 1), len(self.within)
        within = torch.arange(TAPS - 1) - tap  # of the token that reads a row by this tap
        starts = (self.lengths.cumsum(0) - self.lengths).unsqueeze(1)
        is_there = (within >= 0) & (within < self.lengths.unsqueeze(1))
        return torch.where(is_there, starts + within, T).flatten(1)

    @cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk that is open after the call, and its number of tokens, [S] each."""
        total = self.opened + self.lengths
        return total // CHUNK, total % CHUNK


class DecodedSegments:
    """One new token of each sequence, where all is on a device and depends on no number of the host.

    positions [n] int64: the tokens that were read before; slots [n]: where RecurrentState has what they left.
    """

    def __init__(self, positions: torch.Tensor, slots: torch.Tensor):
        self.count, sequence = len(positions), torch.arange(len(positions), device=positions.device)
        columns = [sequence, torch.ones_like(sequence), positions % CHUNK, sequence, slots]
        tokens = torch.stack([torch.zeros_like(sequence), sequence], 1)
        self._tables = SegmentTables(torch.stack(columns, 1).int(), sequence.int(), tokens.int())

    def on(self, device: torch.device) -> SegmentTables:
        """The tables of the Triton kernels."""
        return self._tables


AnySegments = Segments | DecodedSegments
