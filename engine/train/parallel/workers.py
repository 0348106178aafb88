"""Processes that sample and train side by side on one CPU machine.

A token, or the gradient of a shard, depends on nothing that is computed beside it. On a CPU, W processes with
1/W of the cores each waste less time than one process that spreads each operation over all cores, as long as
the operations are small. (Threads of one process would wait for the interpreter's lock at every operation.)
The number of processes decides no bit.

All workers share the memory of the weights and of the gradients that they return. Worker 0 is the caller's
process. The other workers wait for a pair (function, argument), and end when the caller ends.
"""

import os
import pickle
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from ....model.adapters import AdapterLayout, Adapters
from ....model.decoder import Decoder
from ....model.weights import FlatLayout, Layout
from ...config.run_config import NativeConfig
from ...processes.allocator import keep_freed_memory
from ...processes.process import ending, start_python
from ...processes.shared_tensor import SharedTensor, map_tensor
from ...rollout.native import NativeSampler
from ...rollout.stopwatch import Stopwatch
from ...rollout.types import Completion, Request, RequestSource, check_requests, serve_in_waves
from .gradient import ShardSum, ShardsWork, TrainedAdapters, add_roots
from .partition import RequestParts, in_order

X = TypeVar("X")
Y = TypeVar("Y")

# A model with more parameters than this keeps the cores busy with one worker. And each worker needs memory
# for a gradient of its own.
_LARGE = 50_000_000
# Threads or processes that a machine may be asked for.
_MOST_PER_CORE, _MOST_ANYWHERE = 8, 64
_NATIVE = NativeConfig()


def suits(parameters: int) -> bool:
    """Whether several workers are useful for a model with so many parameters, and possible (Linux only)."""
    return parameters <= _LARGE and hasattr(os, "memfd_create")


def automatic(parameters: int) -> int:
    """The number of workers for a model with so many parameters on this machine."""
    return torch.get_num_threads() if suits(parameters) else 1


def use_threads(n: int) -> None:
    """Make torch run its CPU operations on n threads from now on.

    Raises ValueError for so many that starting them could end the process, without a Python exception.
    """
    _refuse_many("threads", n)
    torch.set_num_threads(n)


def _refuse_many(name: str, n: int) -> None:
    cores = os.cpu_count() or 1
    if n > max(_MOST_PER_CORE * cores, _MOST_ANYWHERE):
        raise ValueError(
            f"config: {name} ({n}) must be at most {max(_MOST_PER_CORE * cores, _MOST_ANYWHERE)} "
            f"on this machine of {cores} cores"
        )


@contextmanager
def cpu_threads(n: int) -> Iterator[None]:
    """Inside this context torch runs its CPU operations on n threads."""
    before = torch.get_num_threads()
    if n == before:  # a vLLM in this process refuses any call that sets it, with a warning
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Host:
    """What one worker computes with. Its gradient is made at the first use, because sampling needs none.

    root: shared memory through which worker 0 reads this worker's gradient. Worker 0 itself has none.
    adapters: see ShardSum.
    """

    def __init__(
        self,
        decoder: Decoder,
        shards: int,
        native: NativeConfig,
        workers: int,
        in_flight: int = 1,
        root: torch.Tensor | None = None,
        stopwatch: Stopwatch | None = None,
        adapters: TrainedAdapters | None = None,
    ):
        keep_freed_memory()
        self.decoder, self._shards, self._in_flight, self.root = decoder, shards, in_flight, root
        self._adapters = adapters
        self.sampler = NativeSampler(decoder, **native.model_dump(), workers=workers, stopwatch=stopwatch)
        self._gradient: ShardSum | None = None

    @property
    def gradient(self) -> ShardSum:
        """The sum of this worker's shards."""
        if self._gradient is None:
            self._gradient = ShardSum(self.decoder, self._shards, self._in_flight, self._adapters)
        return self._gradient


class Workers:
    """`n` workers, rounded down to a power of two that divides `shards`, over the CPU threads torch has now.

    `shards` is the number of virtual shards that the workers sum at a time. With more than one worker, or
    with `share`, the decoder's weights move to shared memory (`weights`); with more than one worker, the
    adapters do as well. `in_flight`, `adapters`: see ShardSum. `stopwatch`: measures the sampler of the
    caller's process.

    Raises ChildProcessError when a worker has died.
    """

    def __init__(
        self,
        decoder: Decoder,
        shards: int,
        n: int = 1,
        native: NativeConfig = _NATIVE,
        share: bool = False,
        in_flight: int = 1,
        stopwatch: Stopwatch | None = None,
        adapters: Adapters | None = None,
    ):
        _refuse_many("workers", min(n, shards))
        self.n, self.shards = 1 << (min(n, shards).bit_length() - 1), shards
        self._own_threads = max(1, torch.get_num_threads() // self.n)
        self._others: list[_Process] = []
        self.weights = SharedTensor(decoder.layout.numel, decoder.dtype) if self.n > 1 or share else None
        if self.weights is not None:
            decoder.move_to(self.weights.tensor)
            head = (
                decoder.layout,
                decoder.dtype,
                decoder.numerics,
                decoder.recompute,
                shards // self.n,
                native,
                self.n,
                self._own_threads,
                in_flight,
            )
            self._others = self._start_others(head, decoder.layout, adapters)
        trained = TrainedAdapters(adapters.layout, adapters.flat) if adapters else None
        sizes = shards // self.n, native, self.n, in_flight
        self.host = Host(decoder, *sizes, stopwatch=stopwatch, adapters=trained)

    def _start_others(self, head: tuple, layout: Layout, adapters: Adapters | None) -> list["_Process"]:
        """Start the processes of the other workers, with which the adapters are shared."""
        if self.n == 1 or adapters is None:
            return [_Process(i, self.weights, None, head, layout) for i in range(1, self.n)]
        shared = SharedTensor(adapters.layout.numel, torch.float32)
        adapters.move_to(shared.tensor)
        return [_Process(i, self.weights, shared, head, adapters.layout) for i in range(1, self.n)]

    def own_threads(self) -> AbstractContextManager[None]:
        """Inside this context torch runs on one worker's share of the threads.

        torch's other threads would spin for 10 ms after each operation, on cores that the other workers and
        the ledger need.
        """
        return cpu_threads(self._own_threads)

    def map(self, work: Callable[[Host, X], Y], items: Sequence[X]) -> list[Y]:
        """The results of work(host, item) for at most n items, in order; each worker does one item.

        Where several items raise, the exception of the first of them is raised. With n > 1, `work` must be a
        function of a module, and items and results must be picklable.
        """
        assert len(items) <= self.n, f"{len(items)} items for {self.n} workers"
        for process, item in zip(self._others, items[1:], strict=False):
            process.send((work, item))
        with self.own_threads():
            results = [_attempt(work, self.host, items[0])]
        results += [process.receive() for process, _ in zip(self._others, items[1:], strict=False)]
        for result in results:
            if isinstance(result, _Failure):
                raise result.error
        return results

    def sum_shards(
        self, work: ShardsWork, shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """The result of `work` for each virtual shard (see ShardSum.add), and the gradients' sum.

        The sum is flat over what is trained. None is a shard without sequences; the sum is None if all
        shards are None. The sum is valid until the next call. After an exception the gradient is incomplete,
        and these workers must not be used again.
        """
        n = len(shards) // self.n
        parts = self.map(_sum_part, [(work, shards[i * n : (i + 1) * n]) for i in range(self.n)])
        other_roots = [
            process.root if has_root else None
            for process, (_, has_root) in zip(self._others, parts[1:], strict=True)
        ]
        with self.own_threads():
            gradient = add_roots([self.host.gradient.tree.take(), *other_roots])
        return [result for results, _ in parts for result in results], gradient

    def close(self) -> None:
        """End the other processes."""
        for process in self._others:
            process.close()
        self._others = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sum_part(host: Host, part: tuple[Callable, Sequence]) -> tuple[list, bool]:
    work, shards = part
    results = host.gradient.add(work, shards)
    if host.root is None:
        return results, True  # worker 0: its caller reads the tree directly
    root = host.gradient.tree.take()
    if root is not None:
        host.root.copy_(root)
    return results, root is not None


class ParallelSampler:
    """The native samplers of all workers; each worker samples a part of the prompts.

    The weights are those that the workers share.

    tokens_read, tokens_cached: see NativeSampler; of all workers.
    """

    def __init__(self, workers: Workers):
        self.workers, self._parts = workers, RequestParts(workers.n)
        self.tokens_read = self.tokens_cached = 0

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.workers.host.sampler.version

    @property
    def samples_at_once(self) -> int:
        """Those of the first worker in its last call, times the workers."""
        return self.workers.host.sampler.samples_at_once * self.workers.n

    def sync_weights(self, version: int) -> None:
        """See Sampler."""
        self._parts.forget()
        self.workers.map(_sync_weights, [version] * self.workers.n)

    def end_turns(self) -> None:
        """See Sampler."""
        if self._parts.forget():
            self.workers.map(_end_turns, [None] * self.workers.n)

    def close(self) -> None:
        """Do nothing: the owner of the workers closes them."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Sampler, NativeSampler.generate."""
        config = self.workers.host.decoder.config
        check_requests(requests, config.max_positions, config.vocab_size)
        parts = self._parts.cut(requests)
        outcomes = self.workers.map(_generate, [[requests[i] for i in part] for part in parts])
        self.tokens_read = sum(read for _, read, _ in outcomes)
        self.tokens_cached = sum(cached for _, _, cached in outcomes)
        return in_order(parts, [completions for completions, _, _ in outcomes])

    def serve(self, source: RequestSource) -> None:
        """See ContinuousSampler. Several workers draw in waves."""
        if self.workers.n > 1:
            serve_in_waves(self, source)
            return
        sampler = self.workers.host.sampler
        self.workers.map(_serve, [source])
        self.tokens_read, self.tokens_cached = sampler.tokens_read, sampler.tokens_cached


def _serve(host: Host, source: RequestSource) -> None:
    host.sampler.serve(source)


def _sync_weights(host: Host, version: int) -> None:
    host.sampler.sync_weights(version)


def _end_turns(host: Host, _: None) -> None:
    host.sampler.end_turns()


def _generate(host: Host, requests: list[Request]) -> tuple[list[Completion], int, int]:
    """The completions, and how many tokens were read and were cached."""
    completions, sampler = host.sampler.generate(requests), host.sampler
    return completions, sampler.tokens_read, sampler.tokens_cached


@dataclass(frozen=True)
class _Failure:
    """An exception on its way to the caller."""

    error: BaseException


def _attempt(work: Callable[[Host, X], Y], host: Host, item: X) -> Y | _Failure:
    try:
        return work(host, item)
    except Exception as error:
        return _Failure(error)


class _Process:
    """One of the other workers, as the caller sees it."""

    def __init__(
        self,
        index: int,
        weights: SharedTensor,
        adapters: SharedTensor | None,
        head: tuple,
        trained: FlatLayout,
    ):
        """trained: the layout of what is trained, that of the adapters where there are some."""
        self.index, root = index, SharedTensor(trained.trained_numel, torch.float32)
        shared = [weights, root] if adapters is None else [weights, root, adapters]
        self.root = root.tensor
        caller_end, worker_end = socket.socketpair()
        with worker_end:
            fd = worker_end.fileno()
            code = f"from zerokl.engine.train.parallel.workers import serve; serve({fd})"
            with _interrupts_blocked():
                self._process = start_python(
                    code, fds=[fd, *(x.fd for x in shared)], stdin=subprocess.DEVNULL
                )
        self._connection = Connection(caller_end.detach())
        self.send(([x.inherited for x in shared], trained, *head))

    def send(self, message: object) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> object:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._died() from None

    def _died(self) -> ChildProcessError:
        return ChildProcessError(
            f"worker {self.index} (process {self._process.pid}) {ending(self._process.wait())}; "
            "with workers = 1 there is no other process"
        )

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that are started inside this context never see Ctrl-C, from their first instruction on.

    Ctrl-C reaches all processes of a terminal. The caller alone decides what it means. It sees a Ctrl-C of
    this time afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(connection_fd: int) -> None:
    """What the process of another worker runs: it answers until the caller closes the connection."""
    connection = Connection(connection_fd)
    try:
        layout: Layout
        trained: FlatLayout
        (weights, root, *shared), trained, layout, dtype, numerics, recompute, *sizes, threads, in_flight = (
            pickle.loads(connection.recv_bytes())
        )
        torch.set_num_threads(threads)
        flat = map_tensor(weights, layout.numel, dtype)
        decoder = Decoder(layout.config, flat, layout, numerics, recompute)
        adapters = None
        if isinstance(trained, AdapterLayout):
            adapters = TrainedAdapters(trained, map_tensor(*shared, trained.numel, torch.float32))
        own_root = map_tensor(root, trained.trained_numel, torch.float32)
        host = Host(decoder, *sizes, in_flight, own_root, adapters=adapters)
        while True:
            work, item = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_pickled(_attempt(work, host, item)))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass  # the caller has ended, so nobody waits for an answer


def _pickled(result: object) -> bytes:
    """The result as bytes, by plain pickle: multiprocessing's pickler would send tensors as descriptors."""
    if isinstance(result, _Failure):
        origin = "in another worker:\n" + "".join(traceback.format_exception(result.error))
        result.error.add_note(origin)
        try:
            pickle.loads(pickle.dumps(result))
        except Exception:
            result = _Failure(RuntimeError(origin))
    return pickle.dumps(result)
