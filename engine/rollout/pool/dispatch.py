"""Gives batches of requests to actors, and replaces an actor that ends, or that takes too long.

One thread does all of it. It waits for events: a new batch, an answer, an actor that is ready, the end. Who
submits a batch gets a future. Batches wait in their order; the actor with the fewest open batches takes the
next one. An actor has `in_flight` batches at most, so what waits can go to any actor.

A batch whose actor ended is drawn again by another one, before those that wait. It has the same bits there.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..types import Request
from .actor import Answer, WeightsId

# Seconds between two looks at the clock.
_TICK_S = 0.5
# Actors that may end one after another with the same batch, or before they are ready. Then the run ends.
_TRIES = 4


class ActorLostError(Exception):
    """An actor has ended, or cannot be reached. Another one can do its work."""


class PoolError(RuntimeError):
    """No actor can do the work."""


class Cluster(Protocol):
    """Where actors live. A handle is whatever the cluster knows an actor, or weights, by."""

    def publish(self, weights: np.ndarray) -> object:
        """Make weights, [bytes] uint8, available to all actors. Returns their handle."""
        ...

    def start(self) -> object:
        """Begin to start an actor. Returns its handle at once."""
        ...

    def greet(self, actor: object) -> Future:
        """SamplerActor.greet. The future raises ActorLostError where the actor has ended."""
        ...

    def generate(
        self, actor: object, sent: object, weights: WeightsId, requests: Sequence[Request]
    ) -> Future:
        """SamplerActor.generate. sent: a handle of weights. The future: see greet."""
        ...

    def end(self, actor: object) -> None:
        """End an actor at once."""
        ...

    def close(self) -> None:
        """End what this cluster has started."""
        ...


@dataclass
class _Batch:
    sent: object
    weights: WeightsId
    requests: Sequence[Request]
    future: Future = field(default_factory=Future)
    tries: int = 0


@dataclass
class _Actor:
    number: int
    handle: object
    since_s: float  # when it was started, or began the batch that it draws now
    ready: bool = False
    slow: bool = False  # whether it was said that it does not start
    open: list[_Batch] = field(default_factory=list)


@dataclass
class PoolCounts:
    """What the pool has done so far."""

    busy_s: float = 0.0  # seconds that actors drew
    tokens: int = 0
    replaced: int = 0
    batches: int = 0


class Dispatcher:
    """`n` actors of a cluster, and the batches that they draw.

    in_flight: batches that an actor has at a time. timeout_s: seconds for a start, and for a batch.
    environment: what decides bits here (actor.bits_environment). say: shows a line about an actor.
    """

    def __init__(
        self,
        cluster: Cluster,
        n: int,
        in_flight: int,
        timeout_s: float,
        environment: dict[str, Any],
        say: Callable[[str], None],
    ):
        self.cluster, self.n, self._in_flight, self._timeout_s = cluster, n, in_flight, timeout_s
        self._environment, self._say = environment, say
        self.counts = PoolCounts()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[_Batch] = deque()
        self._failed_starts = 0
        self._error: Exception | None = None  # why no batch can be drawn any more
        self._actors = [self._start(i) for i in range(n)]
        self._thread = threading.Thread(target=self._run, name="zerokl pool", daemon=True)
        self._thread.start()

    def submit(self, sent: object, weights: WeightsId, requests: Sequence[Request]) -> Future:
        """The Answer to a batch, drawn by any actor.

        The future raises PoolError where no actor can draw it, ValueError where the actors' bits would be
        others, and what the actor raised.
        """
        batch = _Batch(sent, weights, requests)
        self._events.put(lambda: self._waiting.append(batch))
        return batch.future

    def close(self) -> None:
        """End all actors. What is still open fails."""
        self._events.put(None)
        self._thread.join()
        self.cluster.close()

    def _run(self) -> None:
        while (event := self._next_event()) is not None:
            try:
                event()
                if self._error is None:
                    self._replace_late()
                if self._error is None:
                    self._assign()
            except Exception as error:  # such as a cluster that is gone; whoever waits for a batch raises it
                self._error = error
            if self._error is not None:
                self._fail_all(self._error)
        self._fail_all(PoolError("pool: it was closed"))
        for actor in self._actors:
            self.cluster.end(actor.handle)

    def _next_event(self) -> Callable[[], None] | None:
        """What to do next; nothing after a while without an event. None is the end."""
        try:
            return self._events.get(timeout=_TICK_S)
        except queue.Empty:
            return lambda: None

    def _start(self, number: int) -> _Actor:
        actor = _Actor(number, self.cluster.start(), time.monotonic())
        future = self.cluster.greet(actor.handle)
        future.add_done_callback(lambda done: self._events.put(lambda: self._greeted(actor, done)))
        return actor

    def _greeted(self, actor: _Actor, done: Future) -> None:
        if actor not in self._actors:
            return
        if error := done.exception():
            self._failed_starts += 1
            if self._failed_starts == _TRIES or not isinstance(error, ActorLostError):
                self._error = PoolError(f"pool: {self._failed_starts} actors ended before they drew: {error}")
                return
            self._replace(actor, str(error))
            return
        for name, value in done.result().items():
            if value != self._environment[name]:
                self._error = ValueError(
                    f"pool: actor {actor.number} has {name} {value!r}, and the trainer "
                    f"{self._environment[name]!r}; its bits would be others: use machines and installations "
                    "that are alike"
                )
                return
        actor.ready, self._failed_starts = True, 0

    def _assign(self) -> None:
        ready = [actor for actor in self._actors if actor.ready]
        while self._waiting and ready:
            actor = min(ready, key=lambda a: (len(a.open), a.number))
            if len(actor.open) == self._in_flight:
                return
            self._give(actor, self._waiting.popleft())

    def _give(self, actor: _Actor, batch: _Batch) -> None:
        if not actor.open:
            actor.since_s = time.monotonic()
        actor.open.append(batch)
        future = self.cluster.generate(actor.handle, batch.sent, batch.weights, batch.requests)
        future.add_done_callback(lambda done: self._events.put(lambda: self._answered(actor, batch, done)))

    def _answered(self, actor: _Actor, batch: _Batch, done: Future) -> None:
        if actor not in self._actors or batch not in actor.open:
            return  # it was replaced, and the batch given to another one
        error = done.exception()
        if isinstance(error, ActorLostError):
            self._replace(actor, str(error))
            return
        actor.open.remove(batch)
        actor.since_s = time.monotonic()
        if error is None:
            error = self._wrong(batch, done.result())
        if error is not None:
            batch.future.set_exception(error)
            return
        answer: Answer = done.result()
        self.counts.busy_s += answer.seconds
        self.counts.batches += 1
        self.counts.tokens += sum(len(completion.ids) for completion in answer.completions)
        batch.future.set_result(answer)

    @staticmethod
    def _wrong(batch: _Batch, answer: Answer) -> PoolError | None:
        """What is wrong with an answer; None if it is of the batch's requests and weights."""
        versions = {completion.weight_version for completion in answer.completions}
        if len(answer.completions) != len(batch.requests):
            return PoolError(
                f"pool: an actor gave {len(answer.completions)} completions for {len(batch.requests)} "
                "requests"
            )
        if answer.weights != batch.weights or versions - {batch.weights.version}:
            return PoolError(
                f"pool: an actor drew with the weights {tuple(answer.weights)} (completions of versions "
                f"{sorted(versions)}), and was asked for {tuple(batch.weights)}"
            )
        return None

    def _replace_late(self) -> None:
        now_s = time.monotonic()
        for actor in list(self._actors):
            late = now_s - actor.since_s > self._timeout_s
            if late and actor.open:
                self._replace(actor, f"it took longer than pool.timeout_s ({self._timeout_s:g} s)")
            elif late and not actor.ready:
                self._not_started(actor)

    def _not_started(self, actor: _Actor) -> None:
        """An actor that has no place yet is waited for, as long as others draw."""
        if not any(other.ready for other in self._actors):
            self._error = PoolError(
                f"pool: no actor has started within pool.timeout_s ({self._timeout_s:g} s); does the cluster "
                "have the CPUs and GPUs that pool.cpus and pool.gpus reserve?"
            )
        elif not actor.slow:
            actor.slow = True
            ready = sum(other.ready for other in self._actors)
            self._say(
                f"pool: {ready} of {self.n} actors have started; the cluster has no room for the others"
            )

    def _replace(self, actor: _Actor, reason: str) -> None:
        """Start another actor in the place of one. Its batches come before those that wait."""
        self.cluster.end(actor.handle)
        if actor.open:
            actor.open[0].tries += 1  # the one that it drew
            if actor.open[0].tries == _TRIES:
                self._error = PoolError(f"pool: {_TRIES} actors ended with the same batch: {reason}")
                return
        self._waiting.extendleft(reversed(actor.open))
        self.counts.replaced += 1
        n = sum(len(batch.requests) for batch in actor.open)
        self._say(f"pool: actor {actor.number} is replaced, {n} requests are drawn again: {reason}")
        self._actors[self._actors.index(actor)] = self._start(actor.number)

    def _fail_all(self, error: Exception) -> None:
        open_batches = [batch for actor in self._actors for batch in actor.open]
        for batch in [*open_batches, *self._waiting]:
            batch.future.set_exception(error)
        for actor in self._actors:
            actor.open = []
        self._waiting.clear()
