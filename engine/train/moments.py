"""How the optimizer keeps a moment of its weights between two updates: in fp32, in bf16, or in 8 bits.

An update reads and changes it in fp32. What is kept is exact in fp32, so checkpoints and the ledger have it
so, and a moment that is read from them is kept by the same bits.

8 bits, after Dettmers et al., arXiv:2110.02861: CHUNK elements have one fp32 scale, their largest absolute
value, and each is the nearest of 255 numbers times this scale. The numbers lie closer towards 0: in each of
seven decades twice as many as in the decade below, evenly. Unlike there, the numbers are symmetric, so that
the largest element keeps its bits whatever its sign; and of a second moment none is 0, because a step is
divided by its root. A chunk whose scale is below 2^-100 is all 0: with its codes fp32 would be subnormal.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate

import torch

from ...model.checkpoint import DTYPES
from ...model.offload import Offload

# Elements with one scale. It divides the ledger's blocks, at which ranks cut the weights (parallel/zero.py).
CHUNK = 256
_DECADES = 7
_SMALLEST = 2.0**-100


class Moment:
    """A moment of some of a rank's weights, zero at first.

    ranges: of these weights in the rank's vector [numel], ascending. The moment of all others is 0.
    """

    def __init__(
        self, kept: str, numel: int, ranges: Sequence[slice], offload: Offload, device: torch.device
    ):
        """kept: the setting optimizer.moments, but int8."""
        self._numel, self._ranges, self._offload, self._device = numel, ranges, offload, device
        lengths = [part.stop - part.start for part in ranges]
        self._starts = list(accumulate(lengths, initial=0))
        self._kept = offload.empty(sum(lengths), device, DTYPES.get(kept, torch.uint8)).zero_()

    @contextmanager
    def brought(self, part: slice) -> Iterator[torch.Tensor]:
        """A part of one range, a place in the rank's vector, in fp32 on the device.

        What is changed inside this context is kept at its end.
        """
        kept = self._kept[self._place(part)]
        with self._offload.brought(self._device, kept) as (here,):
            wide = here.float()
            yield wide
            if wide is not here:
                here.copy_(wide)

    def _place(self, part: slice) -> slice:
        """Where a part of one range is kept."""
        i = self._number(part)
        start = self._starts[i] + part.start - self._ranges[i].start
        return slice(start, start + part.stop - part.start)

    def _number(self, part: slice) -> int:
        return bisect_right(self._ranges, part.start, key=lambda place: place.start) - 1

    @property
    def wide(self) -> torch.Tensor:
        """The moment of all weights, [numel] fp32: the memory itself where it is kept so."""
        if self._kept.dtype == torch.float32 and len(self._kept) == self._numel:
            return self._kept
        wide = torch.zeros(self._numel, device=self._kept.device)
        for place in self._ranges:
            wide[place] = self._read(place)
        return wide

    def _read(self, part: slice) -> torch.Tensor:
        """A part of one range, in fp32, where it is kept."""
        return self._kept[self._place(part)].float()

    def load(self, wide: torch.Tensor) -> None:
        """Replace it. wide: at least [numel] fp32."""
        for place in self._ranges:
            for part in self._offload.slices(place.stop - place.start):
                within = slice(place.start + part.start, place.start + part.stop)
                with self.brought(within) as moment:
                    moment.copy_(wide[within])


class CodedMoment(Moment):
    """A moment in 8 bits. A range begins where a chunk does, and so does a part of it."""

    def __init__(
        self, numel: int, ranges: Sequence[slice], offload: Offload, device: torch.device, signed: bool
    ):
        super().__init__("int8", numel, ranges, offload, device)
        self._signed = signed
        self._kept.copy_(encode(torch.zeros(1), signed)[0])
        chunks = [-(-(part.stop - part.start) // CHUNK) for part in ranges]
        self._first_chunk = list(accumulate(chunks, initial=0))
        self._scales = offload.empty(sum(chunks), device).zero_()

    def _codes(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of a part of one range, and the scales of its chunks."""
        i = self._number(part)
        first, rest = divmod(part.start - self._ranges[i].start, CHUNK)
        assert rest == 0, f"{part} cuts a chunk of {self._ranges[i]}"
        codes, first = self._kept[self._place(part)], first + self._first_chunk[i]
        return codes, self._scales[first : first - (-len(codes) // CHUNK)]

    def _read(self, part: slice) -> torch.Tensor:
        return decode(*self._codes(part), self._signed)

    @contextmanager
    def brought(self, part: slice) -> Iterator[torch.Tensor]:
        with self._offload.brought(self._device, *self._codes(part)) as (codes_here, scales_here):
            wide = decode(codes_here, scales_here, self._signed)
            yield wide
            for here, new in zip((codes_here, scales_here), encode(wide, self._signed), strict=True):
                here.copy_(new)


def encode(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n] fp32 -> codes [n] uint8, and the scale of each chunk [ceil(n / CHUNK)] fp32.

    signed: a first moment; a second one is not negative. Of two numbers that are equally near, it is the
    smaller one.
    """
    chunks = torch.nn.functional.pad(x, (0, -len(x) % CHUNK)).view(-1, CHUNK)
    scales = chunks.abs().amax(1)
    scales = torch.where(scales < _SMALLEST, 0.0, scales)
    shares = chunks / torch.where(scales == 0.0, torch.inf, scales).unsqueeze(1)
    codes = torch.bucketize(shares, _numbers(signed, x.device)[1])
    return codes.to(torch.uint8).view(-1)[: len(x)], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """What `encode` has kept, [n] fp32."""
    numbers = _numbers(signed, codes.device)[0]
    return numbers[codes.int()] * scales.repeat_interleave(CHUNK)[: len(codes)]


@cache
def _numbers(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 255 numbers that codes stand for, ascending; and the 254 borders between neighbours, in fp32."""
    positive = []
    for decade in range(_DECADES):
        n = 1 << (decade + (not signed))
        top = 10.0 ** (decade + 1 - _DECADES)
        positive += [top * (0.1 + 0.9 * (i + 0.5) / n) for i in range(n)]
    if signed:
        positive[-1] = 1.0
        numbers = [*(-x for x in reversed(positive)), 0.0, *positive]
    else:
        numbers = [*positive, 1.0]
    exact = torch.tensor(numbers, dtype=torch.float64)
    return exact.float().to(device), ((exact[1:] + exact[:-1]) / 2).float().to(device)
