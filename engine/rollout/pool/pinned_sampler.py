"""A Sampler over the actors of a pool, for the weights of one version.

Many of them may draw side by side, each in a thread of its own: one for each step that is drawn.
"""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ....model.config import ModelConfig
from ..types import Completion, ContinuousSampler, Request, RequestSource, check_requests
from .actor import Answer, WeightsId
from .dispatch import Dispatcher

# Seconds between two looks whether an environment has answered, while actors draw other turns.
_LOOK_S = 0.01


@dataclass(frozen=True)
class Published:
    """Weights that all actors can get: which ones, and the cluster's handle of them."""

    weights: WeightsId
    sent: object


class PinnedSampler(ContinuousSampler):
    """Draws with published weights. The owner of the pool closes it.

    change: makes of a request the one that the actors draw. batch: requests that an actor is given at a time;
    0 is an equal part for each actor, `most` at most.
    """

    def __init__(
        self,
        pool: Dispatcher,
        published: Published,
        config: ModelConfig,
        change: Callable[[Request], Request],
        batch: int,
        most: int,
    ):
        self._pool, self._published, self._config = pool, published, config
        self._change, self._batch, self._most = change, batch, most

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Raises what Dispatcher.submit's future raises, and ValueError (check_requests)."""
        completions: list[Completion] = []
        for _, future in self._submit(list(enumerate(requests))):
            completions += future.result().completions
        return completions

    def serve(self, source: RequestSource) -> None:
        """The turns that are ready go to the actors at once.

        While actors draw, it looks every 10 ms whether an environment has answered.
        """
        done: queue.SimpleQueue[tuple[list[int], Future]] = queue.SimpleQueue()
        n_open = 0
        while True:
            arrived = source.ready(0 if n_open else 1)
            for places, future in self._submit(arrived):
                n_open += 1
                future.add_done_callback(lambda f, places=places: done.put((places, f)))
            if not n_open:
                return
            try:
                places, future = done.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            n_open -= 1
            answer: Answer = future.result()
            for place, completion in zip(places, answer.completions, strict=True):
                source.completed(place, completion)

    def _submit(self, arrived: Sequence[tuple[int, Request]]) -> list[tuple[list[int], Future]]:
        """Cut requests, each with its place, into batches in their order, and submit these.

        Another actor may draw the next turn, so none keeps what it has read.
        """
        requests = [replace(self._change(request), trajectory_tokens=0) for _, request in arrived]
        check_requests(requests, self._config.max_positions, self._config.vocab_size)
        size = self._batch or min(max(1, -(-len(requests) // self._pool.n)), self._most)
        batches = []
        for i in range(0, len(requests), size):
            part = requests[i : i + size]
            future = self._pool.submit(self._published.sent, self._published.weights, part)
            batches.append(([place for place, _ in arrived[i : i + size]], future))
        return batches

    def sync_weights(self, version: int) -> None:
        """Its weights never change."""
        raise AssertionError("a pinned sampler has the weights of one version")
