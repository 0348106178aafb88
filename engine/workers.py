"""Threads that compute virtual shards side by side.

A shard's gradient depends on no other shard. On a CPU, W threads with 1/W of the cores each waste less than one thread
whose operations are each spread over all cores, as long as the operations are small. How many there are decides no bit.
(Sampling gains nothing from it: its operations are so short that the threads wait for the interpreter's lock.)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import TypeVar

import torch

X = TypeVar("X")
Y = TypeVar("Y")

# A model with more parameters keeps the cores busy with one worker, and each worker holds a gradient of its own.
_LARGE = 50_000_000


def automatic(parameters: int) -> int:
    """Workers for a model of that many parameters on this machine."""
    return 1 if parameters > _LARGE else torch.get_num_threads()


class Workers:
    """`n` threads over the CPU threads torch has now; with n = 1 everything runs in the caller's thread."""

    def __init__(self, n: int = 1):
        self.n = n
        self._pool = ThreadPoolExecutor(n) if n > 1 else None
        if self._pool is not None:
            threads, started = torch.get_num_threads(), Barrier(n)
            list(self._pool.map(lambda _: self._enter(max(1, threads // n), started), range(n)))
            torch.set_num_threads(threads)  # _enter also changed what threads that torch has not met yet would start with

    @staticmethod
    def _enter(threads: int, started: Barrier) -> None:
        """Give this worker its share of the CPU threads; all workers start before any goes on."""
        torch.get_num_threads()  # makes torch meet this thread, so that it does not take the default later
        torch.set_num_threads(threads)
        started.wait()

    def map(self, work: Callable[[X], Y], items: Sequence[X]) -> list[Y]:
        """work(item) for each, results in order; the first exception in that order is raised."""
        if self._pool is None or len(items) < 2:
            return [work(item) for item in items]
        futures = [self._pool.submit(work, item) for item in items]
        wait(futures)
        return [f.result() for f in futures]
