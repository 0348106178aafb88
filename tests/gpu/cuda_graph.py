"""torch.cuda on the fake device: streams whose order is kept, and graphs that are replayed on a CPU.

A capture carries nothing out. It takes down each operation and each launch, with the memory that they were
given. A replay carries these out again, without the Python code that made them. So whatever this code should
have changed since, and did not, shows in the numbers.

As on a GPU, a graph does not keep memory alive that was there before its capture. A replay that needs such
memory after it was freed raises FreedMemoryError.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.gpu.fake_cuda import META, FakeCuda
from tests.gpu.timeline import Event, Stream, Timeline


class FreedMemoryError(RuntimeError):
    """A graph was replayed after memory was freed that it reads or writes."""


@dataclass(frozen=True)
class _Borrowed:
    """A tensor over memory from before the capture."""

    storage: StorageWeakRef
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return f"{self.dtype} {[*self.shape]}"

    def tensor(self) -> torch.Tensor:
        """The tensor. Raises FreedMemoryError."""
        if self.storage.expired():
            raise FreedMemoryError(f"a graph needs memory that was freed: {self}")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class _Step(NamedTuple):
    """What a replay does: run(*args, **kwargs), whose results go to `results`."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]


class Graph:
    """torch.cuda.CUDAGraph, of a device with this memory. replays: how often it was replayed."""

    def __init__(self, memory: torch.device, timeline: Timeline):
        self.replays, self.captured = 0, False
        self.pool: object = self  # whose memory the graph uses
        self._memory, self._timeline, self._steps = memory, timeline, []
        self._own: set[int] = set()  # the storages that the capture made
        self._borrowed: dict[int, _Borrowed] = {}  # by the storage

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take an operation on the memory, and return its results, whose numbers do not count."""
        if func._schema.is_mutable:
            self._add(func, args, kwargs, [])
            return args[0]
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to(META), (args, kwargs))
        made = func(*on_meta[0], **on_meta[1] | ({"device": META} if "device" in kwargs else {}))
        results = tree_map_only(torch.Tensor, self._make, made)
        self._add(func, args, kwargs, [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)])
        return results

    def launch(self, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Take the launch run(*args)."""
        self._add(run, args, {}, [])

    def replay(self) -> None:
        """Carry out what was captured. Without numbers that is nothing."""
        assert self.captured, "a replay of a graph that was not captured"
        self.replays += 1
        borrowed = [(str(x), x.storage) for x in self._borrowed.values()]
        self._timeline.replay(borrowed, self.pool)
        for run, args, kwargs, results in () if self._memory == META else self._steps:
            returned = tree_leaves(run(*tree_map(_restored, args), **tree_map(_restored, kwargs)))
            tensors = [x for x in returned if isinstance(x, torch.Tensor)]
            for result, x in zip(results, tensors if results else [], strict=True):
                result.copy_(x)

    def _make(self, like: torch.Tensor) -> torch.Tensor:
        """A result of the capture, full of numbers that no operation gives."""
        x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._memory)
        if self._memory != META:
            x.untyped_storage().fill_(0x7F)
        self._own.add(x.untyped_storage()._cdata)
        self._timeline.belongs_to_graph(x)
        return x

    def _add(self, run: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        self._steps.append(_Step(run, tree_map(self._held, args), tree_map(self._held, kwargs), results))

    def _held(self, x: Any) -> Any:
        """An argument as the graph holds it: borrowed, if it is a tensor from before the capture."""
        if hasattr(x, "block_shape"):  # a TensorDescriptor
            held = copy.copy(x)
            held.base = self._held(x.base)
            return held
        # The numbers of the host are handed over by their value.
        if not isinstance(x, torch.Tensor) or not (x.dim() or self._timeline.knows(x)):
            return x
        storage = StorageWeakRef(x.untyped_storage())
        if storage.cdata in self._own:
            return x
        held = _Borrowed(storage, x.dtype, x.shape, x.stride(), x.storage_offset())
        self._borrowed.setdefault(storage.cdata, held)
        return held


def _restored(x: Any) -> Any:
    """An argument that a graph held."""
    if hasattr(x, "block_shape"):
        restored = copy.copy(x)
        restored.base = _restored(x.base)
        return restored
    return x.tensor() if isinstance(x, _Borrowed) else x


def torch_cuda(cuda: FakeCuda, captures: list[Graph], free_bytes: Callable[[], int]) -> dict[str, Any]:
    """What torch.cuda offers on the fake device, by name. captures: takes each graph that was captured."""

    timeline = cuda.timeline

    @contextmanager
    def graph(graph: Graph, pool: object = None, **options: Any) -> Iterator[None]:
        assert cuda.capture is None, "a capture in a capture"
        cuda.capture, graph.pool = graph, pool or graph
        try:
            yield
        finally:
            cuda.capture = None
        graph.captured = True
        captures.append(graph)

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, timeline.current = timeline.current, stream
        try:
            yield
        finally:
            timeline.current = before

    def synchronize(*args: Any) -> None:
        cuda.note("wait", "synchronize")
        timeline.synchronize()

    class DeviceEvent(Event):
        def __init__(self, **options: bool):
            super().__init__(timeline)

        def synchronize(self) -> None:
            cuda.note("wait", "synchronize", self.knows)

    return {
        "CUDAGraph": lambda: Graph(cuda.memory, timeline),
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "Stream": timeline.stream,
        "stream": on_stream,
        "current_stream": lambda *_: timeline.current,
        "Event": DeviceEvent,
        "synchronize": synchronize,
        "current_device": lambda: 0,
        "mem_get_info": lambda *_: (free_bytes(), 80 << 30),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }
