"""How long the stations of a step take, and how much is done in them.

On a CPU a station's time is the host's clock. On a GPU it is the time between two CUDA events, one before and
one after what the station launches. So no station waits for the GPU, and the time of what runs
asynchronously goes to the station that launched it. They decide no bit, and are not in the ledger.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import record_function

# A moment: seconds of the host's clock, or an event in the GPU's queue.
_Moment = float | torch.cuda.Event


class Stopwatch:
    """Measures the stations of one step after another, on one device."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, _Moment, _Moment]] = []
        self.counts: Counter[str] = Counter()  # what was done in this step, by name

    @contextmanager
    def station(self, name: str) -> Iterator[None]:
        """Measure what runs inside this context. A profiler's trace shows the station by its name.

        A station may be entered several times in a step. An exception leaves its time out.
        """
        with record_function(name):
            began = self._now()
            yield
            self._laps.append((name, began, self._now()))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forget what is measured inside this context: it is no part of the step, such as a measurement."""
        laps, self._laps = self._laps, []
        counts, self.counts = self.counts, Counter()
        try:
            yield
        finally:
            self._laps, self.counts = laps, counts

    def start(self) -> Callable[[str], AbstractContextManager[None]]:
        """Begin a step: forget what was measured before, such as an evaluation. Returns `station`."""
        self._laps, self.counts = [], Counter()
        return self.station

    def seconds(self) -> dict[str, float]:
        """Station -> its seconds in this step.

        A station is left out where the GPU has not reached its end yet. Nothing waits for it.
        """
        pending = {name for name, _, end in self._laps if not (isinstance(end, float) or end.query())}
        totals: dict[str, float] = {}
        for name, began, end in self._laps:
            if name not in pending:
                totals[name] = totals.get(name, 0.0) + _between(began, end)
        return totals

    def _now(self) -> _Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: _Moment, end: _Moment) -> float:
    """The seconds between two moments of one kind."""
    if isinstance(began, float):
        return end - began
    return began.elapsed_time(end) / 1e3  # it is in milliseconds
