"""In which order streams, the host and copies use memory on the fake device, and who uses it too long.

A launch returns before its kernel has run. So a tensor can die, and its memory can get another owner, while a
kernel still reads it. These are faults, each a line of `Timeline.faults`:

    order    an operation uses memory that an operation of another stream writes, or writes what that one
             reads, and no event and no wait orders the two. To allocate memory counts as to write it
    death    memory dies while a stream may use it that is not the stream on which it was allocated. torch
             gives it to the next tensor of the latter stream, unless record_stream was called
    graph    a graph is replayed after memory died that it uses, or memory that belongs to a graph is used
             outside of its graphs, where the next replay writes over it
    source   pinned memory is changed, or freed, before a copy from it has ended that does not wait
    target   pinned memory is used before a copy into it has ended that does not wait

torch keeps pinned memory itself until the copies have ended that were started with a tensor of its own
allocator. A tensor that numpy made over such memory is not one: torch looks for the address, and knows the
first one only (CachingHostAllocator: record_event).

Streams, events and waits are vector clocks (Mattern 1989): each stream, and the host, knows up to which
operation of each stream it comes after. Two things are narrower than torch's. A tensor must be in order at
its death, though a wait before the next allocation would be in time. torch.cuda.graph is no wait, though
torch synchronises there. A launch counts as a write of all that it is given: who reads and writes is in the
kernel alone.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

# Fills pinned memory on its way to the host.
_NOT_ARRIVED = 0x7F
Clock = dict["Stream", int]  # stream -> the number of its operations that are over


def _learn(knower: Clock, news: Clock) -> None:
    for stream, n in news.items():
        if n > knower.get(stream, 0):
            knower[stream] = n


class Stream:
    """torch.cuda.Stream. knows: the operations after which its next one comes."""

    def __init__(self, timeline: "Timeline"):
        self._timeline = timeline
        self.knows: Clock = {}

    def wait_stream(self, other: "Stream") -> None:
        _learn(self.knows, other.knows)

    def wait_event(self, event: "Event") -> None:
        _learn(self.knows, event.knows)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._timeline.host_learns(self.knows)

    def record(self, x: torch.Tensor) -> None:
        """x.record_stream(this stream)."""
        self._timeline.record_stream(x, self)


class Event:
    """torch.cuda.Event."""

    def __init__(self, timeline: "Timeline", **options: bool):
        self._timeline = timeline
        self.knows: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.knows = dict((stream or self._timeline.current).knows)

    def wait(self, stream: Stream | None = None) -> None:
        _learn((stream or self._timeline.current).knows, self.knows)

    def query(self) -> bool:
        """An event that is asked has happened."""
        self._timeline.host_learns(self.knows)
        return True

    def synchronize(self) -> None:
        self._timeline.host_learns(self.knows)

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@dataclass
class _Memory:
    """Of the device. `writes` and `reads`: the last operation of each stream."""

    name: str
    stream: Stream  # on which it was allocated
    ref: weakref.ref | None  # calls back at its death
    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)  # by record_stream
    in_graph: bool = False
    used_at: dict[Stream, str] = field(default_factory=dict)  # by streams other than its own


class _Pinned(NamedTuple):
    start: int
    bytes: int
    ref: weakref.ref


class _Copy(NamedTuple):
    """One between pinned memory and the device that the host did not wait for."""

    stream: Stream
    n: int  # its number in the stream
    place: str
    host: torch.Tensor | None  # kept as torch keeps it; None where torch does not know whose the memory is
    owner: int  # the pinned storage
    content: torch.Tensor  # the numbers that are copied
    to_host: bool

    @property
    def expected(self) -> torch.Tensor:
        """What the host's memory holds until the copy has ended."""
        return _bytes(self.content).fill_(_NOT_ARRIVED) if self.to_host else _bytes(self.content)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).clone()


class Timeline:
    """What happened so far. place: names the line of the package that runs.

    current: the stream. faults: a line each, without repetitions.
    """

    def __init__(self, place: Callable[[], str]):
        self._place = place
        self._faults: dict[str, None] = {}
        self._host: Clock = {}
        self._memories: dict[int, _Memory] = {}
        self._pinned: dict[int, _Pinned] = {}
        self._copies: list[_Copy] = []
        self._pools: dict[Any, _Memory] = {}
        self._streams: list[Stream] = []
        self.current = self.stream()

    def stream(self, **options: int) -> Stream:
        """A new stream."""
        self._streams.append(Stream(self))
        return self._streams[-1]

    @property
    def faults(self) -> list[str]:
        return list(self._faults)

    def _fault(self, text: str) -> None:
        self._faults[f"{self._place()}: {text}"] = None

    # The device's memory

    def operation(
        self,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor] = (),
        made: Iterable[torch.Tensor] = (),
    ) -> None:
        """An operation of the current stream on tensors of the device."""
        n = self._next()
        for x in read:
            self._use(self._memory(x), n, writes=False)
        for x in written:
            self._use(self._memory(x), n, writes=True)
        for x in made:
            self._use(self._memory(x), n, writes=True)

    def knows(self, x: torch.Tensor) -> bool:
        """Whether x is memory of the device."""
        return x.untyped_storage()._cdata in self._memories

    def belongs_to_graph(self, x: torch.Tensor) -> None:
        """x was made by a capture."""
        self._memory(x).in_graph = True

    def record_stream(self, x: torch.Tensor, stream: Stream) -> None:
        """torch.Tensor.record_stream."""
        self._memory(x).recorded.add(stream)

    def replay(self, borrowed: Iterable[tuple[str, StorageWeakRef]], pool: Any) -> None:
        """A replay, on the current stream. borrowed: memory that is not the graph's, with its name."""
        n = self._next()
        self._use(self._pools.setdefault(pool, _Memory("a graph's memory", self.current, None)), n, True)
        for name, storage in borrowed:
            if storage.expired():
                self._fault(f"a graph needs memory that was freed: {name}")
            elif storage.cdata in self._memories:
                self._use(self._memories[storage.cdata], n, writes=True)

    def _next(self) -> int:
        """The number of the next operation of the current stream."""
        knows = self.current.knows
        _learn(knows, self._host)
        knows[self.current] = knows.get(self.current, 0) + 1
        return knows[self.current]

    def _memory(self, x: torch.Tensor) -> _Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            ref = weakref.ref(storage, lambda _: self._died(key))
            self._memories[key] = _Memory(f"{x.dtype} {[*x.shape]}", self.current, ref)
        return self._memories[key]

    def _use(self, memory: _Memory, n: int, writes: bool) -> None:
        stream, now = self.current, "writes" if writes else "reads"
        if memory.in_graph:
            self._fault(f"{memory.name} belongs to a graph, whose next replay writes over it")
        if self._unordered(memory.writes, stream.knows):
            self._fault(f"a stream {now} {memory.name}, and another one that writes it may not have ended")
        elif writes and self._unordered(memory.reads, stream.knows):
            self._fault(f"a stream writes {memory.name}, and another one that reads it may not have ended")
        (memory.writes if writes else memory.reads)[stream] = n
        if stream is not memory.stream:
            memory.used_at[stream] = self._place()

    def _unordered(self, uses: Clock, knows: Clock, but: Iterable[Stream] = ()) -> list[Stream]:
        """The streams of these uses that may still run, for whoever has this clock."""
        return [stream for stream, n in uses.items() if n > knows.get(stream, 0) and stream not in but]

    def _died(self, key: int) -> None:
        memory = self._memories.pop(key)
        knows = dict(memory.stream.knows)
        _learn(knows, self._host)
        for uses in (memory.writes, memory.reads):
            for stream in self._unordered(uses, knows, but={memory.stream, *memory.recorded}):
                used = memory.used_at[stream]
                self._fault(f"{memory.name} died, and another stream may still use it ({used})")

    # What the host knows, and its memory

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self._streams:
            self.host_learns(stream.knows)

    def host_learns(self, knows: Clock) -> None:
        """The host knows that these operations are over."""
        _learn(self._host, knows)
        over = [copy for copy in self._copies if copy.n <= self._host.get(copy.stream, 0)]
        self._copies = [copy for copy in self._copies if copy.n > self._host.get(copy.stream, 0)]
        with _disable_current_modes():
            for copy in over:
                self._end(copy)

    def _end(self, copy: _Copy) -> None:
        if copy.host is None:
            return
        if not torch.equal(_bytes(copy.host), copy.expected):
            what = "into it" if copy.to_host else "from it"
            self._fault(f"pinned memory was changed before the copy {what} had ended ({copy.place})")
        if copy.to_host:
            copy.host.copy_(copy.content)

    def pin(self, x: torch.Tensor) -> None:
        """The memory of x is torch's pinned memory."""
        storage = x.untyped_storage()
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self._pinned_died(key))
        self._pinned[key] = _Pinned(storage.data_ptr(), storage.nbytes(), ref)

    def is_pinned(self, x: torch.Tensor) -> bool:
        """As CUDA sees it: by the address."""
        return self._owner(x) is not None

    def upload(self, host: torch.Tensor, to: torch.Tensor) -> None:
        """A copy from pinned memory to `to`, which does not wait."""
        self.operation((), (to,))
        self._copying(host, host.clone(), to_host=False)

    def download(self, to: torch.Tensor, source: torch.Tensor, content: torch.Tensor) -> None:
        """A copy of `source`, whose numbers are `content`, to pinned memory, which does not wait."""
        self.operation((source,))
        self.host_uses(to)
        to.view(-1).view(torch.uint8).fill_(_NOT_ARRIVED)
        self._copying(to, content.to(to.dtype).expand_as(to), to_host=True)

    def host_uses(self, x: torch.Tensor) -> None:
        """The host reads or writes x."""
        if any(copy.to_host for copy in self._copies):
            owner = self._owner(x)
            for copy in self._copies:
                if copy.to_host and copy.owner == owner:
                    self._fault(f"the host uses memory before the copy into it has ended ({copy.place})")

    def _copying(self, host: torch.Tensor, content: torch.Tensor, to_host: bool) -> None:
        owner, stream = self._owner(host), self.current
        is_owner = host.untyped_storage()._cdata == owner
        known = is_owner or host.data_ptr() == self._pinned[owner].start
        place = self._place()
        copy = _Copy(stream, stream.knows[stream], place, host if known else None, owner, content, to_host)
        self._copies.append(copy)

    def _owner(self, x: torch.Tensor) -> int | None:
        """The pinned storage in which x lies."""
        key, address = x.untyped_storage()._cdata, x.data_ptr()
        if key in self._pinned:
            return key
        holds = (k for k, p in self._pinned.items() if p.start <= address < p.start + p.bytes)
        return next(holds, None)

    def _pinned_died(self, key: int) -> None:
        del self._pinned[key]
        for copy in self._copies:
            if copy.owner == key and copy.host is None:
                self._fault(f"pinned memory was freed before the copy from it had ended ({copy.place})")
