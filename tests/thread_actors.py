"""Actors of a pool as threads of this process, which die, hang and lie as a test plans."""

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zerokl.engine.rollout.pool.actor import SamplerActor
from zerokl.engine.rollout.pool.dispatch import ActorLostError


class _Handle:
    """An actor, with a thread of its own. Its calls fail from its end on."""

    def __init__(self, make: Callable[[], SamplerActor]):
        self.thread, self.open, self.ended = ThreadPoolExecutor(1), set(), False
        self.actor = self.thread.submit(make)

    def call(self, work: Callable[[SamplerActor], Any]) -> Future:
        result: Future = Future()
        self.open.add(result)

        def run() -> None:
            try:
                value, error = work(self.actor.result()), None
            except Exception as raised:
                value, error = None, raised
            if not self.ended:
                self.open.discard(result)
                result.set_exception(error) if error else result.set_result(value)

        if self.ended:
            result.set_exception(ActorLostError("it had ended"))
        else:
            self.thread.submit(run)
        return result

    def end(self) -> None:
        self.ended = True
        for future in [f for f in self.open if not f.done()]:
            future.set_exception(ActorLostError("it was ended"))
        self.thread.shutdown(wait=False, cancel_futures=True)


class ThreadCluster:
    """A Cluster of threads.

    befalls(n, lost): what befalls the n-th batch, which was lost so often before: "", "death", "late death"
    or "hang".
    """

    def __init__(
        self,
        blueprint: object,
        actor_class: type[SamplerActor] = SamplerActor,
        befalls: Callable[[int, int], str] = lambda n, lost: "",
    ):
        self._make, self._befalls = lambda: actor_class(blueprint), befalls
        self.calls, self.started = 0, 0
        self._lost: Counter[str] = Counter()

    def publish(self, weights: Any) -> object:
        return weights.copy()  # as it was when it was sent

    def start(self) -> _Handle:
        self.started += 1
        return _Handle(self._make)

    def greet(self, actor: _Handle) -> Future:
        return actor.call(lambda sampler: sampler.greet())

    def generate(self, actor: _Handle, *batch: Any) -> Future:
        _, _, requests = batch
        same = repr([(request.rng_key, request.ids) for request in requests])
        fate, self.calls = self._befalls(self.calls, self._lost[same]), self.calls + 1
        self._lost[same] += fate != ""
        if fate == "hang":
            return actor.call(lambda _: None) and Future()

        def work(sampler: SamplerActor) -> Any:
            if fate == "death":
                raise ActorLostError("planned")
            answer = sampler.generate(*batch)
            if fate:  # it has drawn, and nobody hears of it
                raise ActorLostError("planned, after the work")
            return answer

        return actor.call(work)

    def end(self, actor: _Handle) -> None:
        actor.end()

    def close(self) -> None:
        """Nothing runs outside this process."""


def at_random(seed: int) -> Callable[[int, int], str]:
    """A third of the batches are lost, some of them after they were drawn.

    No batch is lost four times, with which a run ends.
    """
    draw = random.Random(seed)

    def befalls(n: int, lost: int) -> str:
        fate = draw.choice(["", "", "", "", "death", "late death"])
        return fate if lost < 3 else ""

    return befalls
