"""Processes that sample and train side by side on one CPU machine.

A token and a shard's gradient depend on nothing that is computed beside them. On a CPU, W processes with 1/W
of the cores each waste less than one process whose operations are each spread over all cores, as long as the
operations are small: threads of one process would wait for the interpreter's lock at every operation. How
many there are decides no bit.

The weights lie in memory that all of them share, and so do the gradients they return. Worker 0 is the
caller's process; the others wait for (function, argument), and end when the caller does.
"""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.weights import Layout
from ..config import NativeConfig
from ..rollout.native import NativeSampler, check_prompts
from ..rollout.types import GenerationParams, RngKey, Rollout
from ..shared_tensor import SharedTensor, map_tensor
from .gradient import ShardSum, add_roots
from .partition import virtual_shards

X = TypeVar("X")
Y = TypeVar("Y")

# A model with more parameters keeps the cores busy with one worker, and each worker holds a gradient of its
# own.
_LARGE = 50_000_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NATIVE = NativeConfig()


def suits(parameters: int) -> bool:
    """Whether more than one worker is of use for a model of that many parameters, and possible (Linux only)."""
    return parameters <= _LARGE and hasattr(os, "memfd_create")


def automatic(parameters: int) -> int:
    """Workers for a model of that many parameters on this machine."""
    return torch.get_num_threads() if suits(parameters) else 1


@contextmanager
def cpu_threads(n: int) -> Iterator[None]:
    """torch runs its CPU operations on n threads inside."""
    before = torch.get_num_threads()
    if n == before:  # vLLM in this process lets nobody set it, and warns
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, instead of giving it back and having it zeroed
    again; nothing with another libc.

    Blocks of up to 32 MB, its limit, and 64 MB at the top of the heap (benchmarks/LOG.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


class Host:
    """What one worker computes with. Its gradient is made when first asked for: sampling needs none."""

    def __init__(self, decoder: Decoder, shards: int, native: NativeConfig, workers: int):
        keep_freed_memory()
        self.decoder, self._shards = decoder, shards
        self.sampler = NativeSampler(decoder, **native.model_dump(), workers=workers)
        self._gradient: ShardSum | None = None
        self.root: torch.Tensor | None = (
            None  # where the others read this worker's gradient; worker 0 needs none
        )

    @property
    def gradient(self) -> ShardSum:
        """The sum of this worker's shards."""
        if self._gradient is None:
            self._gradient = ShardSum(self.decoder, self._shards)
        return self._gradient


class Workers:
    """`n` workers over the CPU threads torch has now, rounded down to a power of two that divides `shards`.

    `shards` is the number of virtual shards that they sum at a time. With more than one, or with `share`, the
    decoder's weights move to shared memory (`weights`). Raises ChildProcessError when a worker has died.
    """

    def __init__(
        self, decoder: Decoder, shards: int, n: int = 1, native: NativeConfig = _NATIVE, share: bool = False
    ):
        self.n, self.shards = 1 << (min(n, shards).bit_length() - 1), shards
        self._own_threads = max(1, torch.get_num_threads() // self.n)
        self._others: list[_Process] = []
        self.weights = SharedTensor(decoder.layout.numel, decoder.dtype) if self.n > 1 or share else None
        if self.weights is not None:
            decoder.move_to(self.weights.tensor)
            head = (
                decoder.config,
                decoder.dtype,
                decoder.numerics,
                shards // self.n,
                native,
                self.n,
                self._own_threads,
            )
            self._others = [_Process(i, self.weights, head, decoder.layout.numel) for i in range(1, self.n)]
        self.host = Host(decoder, shards // self.n, native, self.n)

    def own_threads(self) -> AbstractContextManager[None]:
        """torch runs on one worker's share of the threads inside.

        Threads of torch's would spin for 10 ms after each operation, on cores that the other workers and the
        ledger need.
        """
        return cpu_threads(self._own_threads)

    def map(self, work: Callable[[Host, X], Y], items: Sequence[X]) -> list[Y]:
        """work(host, item) for each item, at most n of them, a worker each; results in order. The first
        exception in order is raised.

        With n > 1, `work` must be a function of a module and items and results must be picklable.
        """
        assert len(items) <= self.n, f"{len(items)} items for {self.n} workers"
        for other, item in zip(self._others, items[1:], strict=False):
            other.send((work, item))
        with self.own_threads():
            results = [_attempt(work, self.host, items[0])]
        results += [other.receive() for other, _ in zip(self._others, items[1:], strict=False)]
        for result in results:
            if isinstance(result, _Failure):
                raise result.error
        return results

    def sum_shards(
        self, work: Callable[[Decoder, X], Y], shards: Sequence[X | None]
    ) -> tuple[list[Y | None], torch.Tensor | None]:
        """work(decoder, shard) for each virtual shard, and the sum of their gradients [numel], valid until
        the next call.

        None is a shard without sequences; the sum is None if all are. After an exception the gradient is
        incomplete, and these workers must not be used again.
        """
        each = len(shards) // self.n
        done = self.map(_sum_part, [(work, shards[i * each : (i + 1) * each]) for i in range(self.n)])
        others = [
            other.root if has_root else None
            for other, (_, has_root) in zip(self._others, done[1:], strict=True)
        ]
        with self.own_threads():
            gradient = add_roots([self.host.gradient.tree.take(), *others])
        return [result for results, _ in done for result in results], gradient

    def close(self) -> None:
        """End the other processes."""
        for other in self._others:
            other.close()
        self._others = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sum_part(host: Host, part: tuple[Callable, Sequence]) -> tuple[list, bool]:
    work, shards = part
    results = [host.gradient.add(work, shard) for shard in shards]
    if host.root is None:
        return results, True  # worker 0, whose tree is at hand
    root = host.gradient.tree.take()
    if root is not None:
        host.root.copy_(root)
    return results, root is not None


class ParallelSampler:
    """The native sampler of every worker, each for a part of the prompts; the weights are the ones the
    workers share.
    """

    def __init__(self, workers: Workers, version: int = 0):
        self.workers, self.version = workers, version

    def sync_weights(self, version: int) -> None:
        """See Sampler."""
        self.workers.host.sampler.sync_weights(version)
        self.version = version

    def close(self) -> None:
        """The workers are closed by their owner."""

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey
    ) -> list[Rollout]:
        """See Sampler, NativeSampler.generate."""
        config = self.workers.host.decoder.config
        check_prompts(prompts, generation_params, config.max_positions, config.vocab_size)
        parts, first = [], rng_key.first_prompt
        for some in virtual_shards(prompts, max(1, min(self.workers.n, len(prompts)))):
            parts.append((list(some), generation_params, replace(rng_key, first_prompt=first), self.version))
            first += len(some)
        return [rollout for part in self.workers.map(_generate, parts) for rollout in part]


def _generate(
    host: Host, part: tuple[Sequence[Sequence[int]], GenerationParams, RngKey, int]
) -> list[Rollout]:
    prompts, generation_params, rng_key, host.sampler.version = part
    return host.sampler.generate(prompts, generation_params, rng_key)


@dataclass(frozen=True)
class _Failure:
    """An exception on its way to the caller."""

    error: BaseException


def _attempt(work: Callable[[Host, X], Y], host: Host, item: X) -> Y | _Failure:
    try:
        return work(host, item)
    except Exception as error:
        return _Failure(error)


def ending(code: int) -> str:
    """How a process ended, from its exit code."""
    hint = "; this is how Linux ends a process when memory runs out" if code == -signal.SIGKILL else ""
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    ) + hint


def start_python(code: str, *words: str, fds: Sequence[int], stdin: int | None = None) -> subprocess.Popen:
    """A Python process that runs `code`, with this one's modules and the file descriptors `fds`.

    Not a fork (OpenMP does not survive one) nor multiprocessing's (it runs the caller's script again).
    """
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.Popen(command, pass_fds=fds, env=os.environ | {"PYTHONPATH": path}, stdin=stdin)


class _Process:
    """Another worker, from the caller's side."""

    def __init__(self, index: int, weights: SharedTensor, head: tuple, numel: int):
        self.index, root = index, SharedTensor(numel, torch.float32)
        self.root = root.tensor
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from zerokl.engine.parallel.workers import serve; serve({theirs.fileno()})"
            self._process = start_python(
                code, fds=[theirs.fileno(), weights.fd, root.fd], stdin=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self.send((weights.inherited, root.inherited, *head))

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
            f"worker {self.index} (process {self._process.pid}) {ending(self._process.wait())}; with workers = 1 there is no other process"
        )

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def serve(connection_fd: int) -> None:
    """The life of another worker: answer until the caller closes the connection."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the caller decides what it means
    connection = Connection(connection_fd)
    try:
        config: ModelConfig
        weights, root, config, dtype, numerics, shards, native, workers, threads = pickle.loads(
            connection.recv_bytes()
        )
        torch.set_num_threads(threads)
        layout = Layout(config)
        decoder = Decoder(config, map_tensor(weights, layout.numel, dtype), layout, numerics)
        host = Host(decoder, shards, native, workers)
        host.root = map_tensor(root, layout.numel, torch.float32)
        while True:
            work, item = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_pickled(_attempt(work, host, item)))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass  # the caller has gone: nobody waits for an answer


def _pickled(result: object) -> bytes:
    """Plain pickle: multiprocessing's own would hand tensors over as file descriptors."""
    if isinstance(result, _Failure):
        where = "in another worker:\n" + "".join(traceback.format_exception(result.error))
        result.error.add_note(where)
        try:
            pickle.loads(pickle.dumps(result))
        except Exception:
            result = _Failure(RuntimeError(where))
    return pickle.dumps(result)
