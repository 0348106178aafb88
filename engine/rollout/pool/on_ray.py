"""The actors of a Ray cluster (https://docs.ray.io), of this machine or of many nodes.

Every node needs the same zerokl and the same Ray. Weights go once to the object store of each node that has
an actor, in Ray's own way, and all actors of the node read them there.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...config.run_config import PoolConfig
from ..types import Request
from .actor import Blueprint, SamplerActor, WeightsId
from .dispatch import ActorLostError

# Bytes of a local object store beside the weights: requests and answers.
_STORE_BYTES = 256 << 20
# Seconds in which a cluster's address must answer.
_ANSWER_S = 10.0


def require_ray() -> Any:
    """The module ray. Raises ValueError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ValueError(
            'pool.engine ("ray"): Ray is not installed; pip install \'ray>=2.50\', or set pool.engine = ""'
        ) from None
    return ray


class RayCluster:
    """Actors made from `blueprint`. See Cluster.

    kept: versions of the weights that are needed at a time, for which a cluster of its own has memory.
    actor_class: what the actors are. Raises ValueError where there is no cluster at pool.address.
    """

    def __init__(
        self,
        config: PoolConfig,
        blueprint: Blueprint,
        kept: int,
        actor_class: type = SamplerActor,
    ):
        self._ray = ray = require_ray()
        self._owns = not ray.is_initialized()
        if self._owns:
            self._join(config, kept * blueprint.layout.numel * blueprint.dtype.itemsize)
        self._blueprint = ray.put(blueprint)
        self._actor = ray.remote(actor_class).options(
            num_cpus=config.cpus, num_gpus=config.gpus, scheduling_strategy="SPREAD", max_restarts=0
        )

    def _join(self, config: PoolConfig, weight_bytes: int) -> None:
        """Join the cluster at the address, or start one on this machine."""
        _check_reachable(config.address)
        options = {"log_to_driver": False, "logging_level": "error"}
        if not config.address:
            options |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(config.actors * config.cpus)),
                "include_dashboard": False,
                "object_store_memory": weight_bytes + _STORE_BYTES,
            }
        try:
            self._ray.init(address=config.address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())
            raise ValueError(f"pool.address ({config.address!r}): no Ray cluster there; {line}") from None

    def publish(self, weights: np.ndarray) -> object:
        return self._ray.put(weights)

    def start(self) -> object:
        return self._actor.remote(self._blueprint)

    def greet(self, actor: object) -> Future:
        return self._call(lambda: actor.greet.remote())

    def generate(
        self, actor: object, sent: object, weights: WeightsId, requests: Sequence[Request]
    ) -> Future:
        return self._call(lambda: actor.generate.remote(sent, weights, requests))

    def _call(self, remote: Callable[[], Any]) -> Future:
        """The result of a call, with Ray's errors in the words of Cluster."""
        result: Future = Future()
        try:
            remote().future().add_done_callback(lambda done: self._take(done, result))
        except self._ray.exceptions.RayError as error:
            result.set_exception(_lost(error))
        return result

    def _take(self, done: Future, result: Future) -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # the actor's own exception
            result.set_exception(error.cause or error)
        else:
            result.set_exception(_lost(error))

    def end(self, actor: object) -> None:
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """A cluster that ran before goes on."""
        if self._owns:
            self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ValueError where nothing answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ValueError(f"pool.address ({address!r}): no Ray cluster there; {error}") from None


def _lost(error: BaseException) -> ActorLostError:
    """The first line of Ray's many is the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ActorLostError(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
