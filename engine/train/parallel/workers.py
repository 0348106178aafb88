"""Processes that sample and train side by side on one CPU machine.

A token, or the gradient of a shard, depends on nothing that is computed beside it. On a CPU, W processes with
1/W of the cores each waste less time than one process that spreads each operation over all cores, as long as
the operations are small. (Threads of one process would wait for the interpreter's lock at every operation.)
The number of processes decides no bit.

All workers share the memory of the weights and of the gradients that they return. Worker 0 is the caller's
process. The other workers (worker.py) wait for a pair (function, argument), and end when the caller ends.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from ....model.adapters import Adapters
from ....model.decoder import Decoder
from ....model.weights import FlatLayout
from ...config.run_config import NativeConfig
from ...processes.shared_tensor import SharedTensor
from ...rollout.stopwatch import Stopwatch
from ...rollout.types import (
    Completion,
    ContinuousSampler,
    Request,
    RequestSource,
    check_requests,
    serve_in_waves,
)
from .gradient import ShardsWork, TrainedAdapters, add_roots
from .partition import RequestParts, in_order
from .worker import Failure, Host, OtherWorker, Share, attempt

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


class Workers:
    """`n` workers, rounded down to a power of two that divides `shards`, over the CPU threads torch has now.

    `shards` is the number of virtual shards that the workers sum at a time. With more than one worker, or
    with `share`, the decoder's weights and the adapters move to shared memory (`weights`, `adapters`).
    `in_flight`, `adapters`: see ShardSum; so is `part`, for one worker. `stopwatch`: measures the sampler of
    the caller's process.

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
        part: FlatLayout | None = None,
    ):
        _refuse_many("workers", min(n, shards))
        self.n, self.shards = 1 << (min(n, shards).bit_length() - 1), shards
        threads = max(1, torch.get_num_threads() // self.n)
        self._share = Share(self.n, shards // self.n, in_flight, threads, native)
        self._others: list[OtherWorker] = []
        self.weights = SharedTensor(decoder.layout.numel, decoder.dtype) if self.n > 1 or share else None
        self.adapters: SharedTensor | None = None
        if self.weights is not None:
            decoder.move_to(self.weights.tensor)
            if adapters is not None:
                self.adapters = SharedTensor(adapters.layout.numel, torch.float32)
                adapters.move_to(self.adapters.tensor)
            trained_layout = adapters.layout if adapters else decoder.layout
            self._others = [
                OtherWorker(i, self._share, decoder, trained_layout, self.weights, self.adapters)
                for i in range(1, self.n)
            ]
        trained = TrainedAdapters(adapters.layout, adapters.flat) if adapters else None
        self.host = Host(decoder, self._share, stopwatch=stopwatch, adapters=trained, part=part)

    def own_threads(self) -> AbstractContextManager[None]:
        """Inside this context torch runs on one worker's share of the threads.

        torch's other threads would spin for 10 ms after each operation, on cores that the other workers and
        the ledger need.
        """
        return cpu_threads(self._share.threads)

    def map(self, work: Callable[[Host, X], Y], items: Sequence[X]) -> list[Y]:
        """The results of work(host, item) for at most n items, in order; each worker does one item.

        Where several items raise, the exception of the first of them is raised. With n > 1, `work` must be a
        function of a module, and items and results must be picklable.
        """
        assert len(items) <= self.n, f"{len(items)} items for {self.n} workers"
        for process, item in zip(self._others, items[1:], strict=False):
            process.send((work, item))
        with self.own_threads():
            results = [attempt(work, self.host, items[0])]
        results += [process.receive() for process, _ in zip(self._others, items[1:], strict=False)]
        for result in results:
            if isinstance(result, Failure):
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


class ParallelSampler(ContinuousSampler):
    """The native samplers of all workers; each worker samples a part of the prompts.

    The weights are those that the workers share. Their owner closes them.

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
        self._parts.forget()
        self.workers.map(_sync_weights, [version] * self.workers.n)

    def end_turns(self) -> None:
        if self._parts.forget():
            self.workers.map(_end_turns, [None] * self.workers.n)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        config = self.workers.host.decoder.config
        check_requests(requests, config.max_positions, config.vocab_size)
        parts = self._parts.cut(requests)
        outcomes = self.workers.map(_generate, [[requests[i] for i in part] for part in parts])
        self.tokens_read = sum(drawn.tokens_read for drawn in outcomes)
        self.tokens_cached = sum(drawn.tokens_cached for drawn in outcomes)
        return in_order(parts, [drawn.completions for drawn in outcomes])

    def serve(self, source: RequestSource) -> None:
        if self.workers.n > 1:  # several workers draw in waves
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


@dataclass(frozen=True)
class _Drawn:
    """What one worker has drawn. tokens_read, tokens_cached: see NativeSampler."""

    completions: list[Completion]
    tokens_read: int
    tokens_cached: int


def _generate(host: Host, requests: list[Request]) -> _Drawn:
    completions, sampler = host.sampler.generate(requests), host.sampler
    return _Drawn(completions, sampler.tokens_read, sampler.tokens_cached)
