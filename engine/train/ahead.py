"""Rollouts of coming steps, collected while the trainer trains.

A step's rollouts depend on its number and on the weights that draw them, and on nothing that a step before
it leaves behind. So a step can be collected as soon as its weights are known: with a lag of k, when step t
begins, step t + k can begin to be drawn. Each step is collected in a thread of its own, with its rewards; the
threads wait for actors, and for the processes of rewards and environments.

With a lag of 0 nothing runs ahead, and the trainer waits for the actors.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from ..rollout.types import Sampler

X = TypeVar("X")


class PinnedSamplers(Protocol):
    """The samplers of coming steps."""

    lag: int

    def pinned(self, ahead: int) -> Sampler:
        """Draws with the weights of the step that comes `ahead` steps after this one, 0 to lag."""
        ...

    def metrics(self, step_s: float) -> dict[str, float]:
        """What the actors did since the last call. step_s: seconds of the step."""
        ...


class Ahead:
    """Collects steps before they are trained on. Use it from one thread.

    steps: of the whole run; none after them is collected.
    """

    def __init__(self, samplers: PinnedSamplers, steps: int):
        self._samplers, self._steps = samplers, steps
        self._begun: dict[int, Future] = {}
        self._waited_s = 0.0

    def take(self, step: int, collect: Callable[[int, Sampler], X]) -> X:
        """What `collect` returns for this step; also begins the steps that can be drawn now.

        step: the trainer is at its beginning, and has published its weights. collect(step, sampler) must
        return the same whenever it runs. Raises what it raised.
        """
        began_s = time.perf_counter()
        for ahead in range(self._samplers.lag + 1):
            coming = step + ahead
            if coming not in self._begun and (coming < self._steps or not ahead):
                self._begun[coming] = _in_thread(collect, coming, self._samplers.pinned(ahead))
        collected = self._begun.pop(step).result()
        self._waited_s = time.perf_counter() - began_s
        return collected

    def metrics(self, step_s: float) -> dict[str, float]:
        """Metrics of the step that was taken last. step_s: its seconds."""
        ready = sum(future.done() for future in self._begun.values())
        return {
            "pool/trainer_idle": self._waited_s / step_s,
            "pool/steps_ahead": float(len(self._begun)),
            "pool/steps_ready": float(ready),
            **self._samplers.metrics(step_s),
        }


def _in_thread(collect: Callable[[int, Sampler], X], step: int, sampler: Sampler) -> Future:
    """The result of collect(step, sampler), which a thread computes. It does not keep the process alive."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(collect(step, sampler))
        except BaseException as error:  # whoever takes the step raises it
            future.set_exception(error)

    threading.Thread(target=work, name=f"zerokl step {step}", daemon=True).start()
    return future
