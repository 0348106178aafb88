"""One of the workers of a CPU machine: what it computes with, and its process."""

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from ....model.adapters import low_rank_by_weight
from ....model.decoder import Decoder
from ....model.numerics import Numerics
from ....model.offload import Offload
from ....model.weights import FlatLayout, Layout
from ...config.run_config import NativeConfig
from ...processes.allocator import keep_freed_memory
from ...processes.channel import Channel
from ...processes.process import Process
from ...processes.shared_tensor import Handle, SharedTensor, map_tensor
from ...rollout.native import NativeSampler
from ...rollout.stopwatch import Stopwatch
from .gradient import ShardSum, TrainedAdapters

X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Share:
    """What one of `workers` workers does. shards: that it sums at a time, `in_flight` of them together.

    threads: on which torch computes.
    """

    workers: int
    shards: int
    in_flight: int
    threads: int
    native: NativeConfig


class Host:
    """What one worker computes with. Its gradient is made at the first use, because sampling needs none.

    root: shared memory through which worker 0 reads this worker's gradient. Worker 0 itself has none.
    adapters, part: see ShardSum.
    """

    def __init__(
        self,
        decoder: Decoder,
        share: Share,
        root: torch.Tensor | None = None,
        stopwatch: Stopwatch | None = None,
        adapters: TrainedAdapters | None = None,
        part: FlatLayout | None = None,
    ):
        keep_freed_memory()
        self.decoder, self._share, self.root, self.adapters = decoder, share, root, adapters
        native = share.native.model_dump()
        self.sampler = NativeSampler(decoder, **native, workers=share.workers, stopwatch=stopwatch)
        self._gradient: ShardSum | None = None
        self._part = part

    @property
    def gradient(self) -> ShardSum:
        """The sum of this worker's shards."""
        if self._gradient is None:
            shards, in_flight = self._share.shards, self._share.in_flight
            self._gradient = ShardSum(self.decoder, shards, in_flight, self.adapters, self._part)
        return self._gradient


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the caller."""

    error: BaseException


def attempt(work: Callable[[Host, X], Y], host: Host, item: X) -> Y | Failure:
    """What work(host, item) returns or raises."""
    try:
        return work(host, item)
    except Exception as error:
        return Failure(error)


def _host(
    share: Share,
    layout: Layout,
    dtype: torch.dtype,
    numerics: Numerics,
    recompute: bool,
    offload: Offload,
    trained: FlatLayout,
    weights: Handle,
    root: Handle,
    adapters: Handle | None,
) -> Host:
    """That of another worker, in its process. trained: the layout of what is trained (see ShardSum)."""
    torch.set_num_threads(share.threads)
    flat, trained_adapters = map_tensor(weights, layout.numel, dtype), None
    decoder = Decoder(layout.config, flat, layout, numerics, recompute, offload)
    if adapters is not None:
        trained_adapters = TrainedAdapters(trained, map_tensor(adapters, trained.numel, torch.float32))
        if not trained.lora.merge:
            decoder.adapt(low_rank_by_weight(*trained_adapters))
    shared_root = map_tensor(root, trained.trained_numel, torch.float32)
    return Host(decoder, share, shared_root, adapters=trained_adapters)


class OtherWorker:
    """One of the other workers, as the caller sees it. trained: see _host."""

    def __init__(
        self,
        index: int,
        share: Share,
        decoder: Decoder,
        trained: FlatLayout,
        weights: SharedTensor,
        adapters: SharedTensor | None,
    ):
        self.index, root = index, SharedTensor(trained.trained_numel, torch.float32)
        self.root = root.tensor
        fds = [shared.fd for shared in (weights, root, adapters) if shared is not None]
        self._process = Process("zerokl.engine.train.parallel.worker:serve", fds=fds)
        self.send(
            partial(
                _host,
                share,
                decoder.layout,
                decoder.dtype,
                decoder.numerics,
                decoder.recompute,
                decoder.offload,
                trained,
                weights.inherited,
                root.inherited,
                adapters and adapters.inherited,
            )
        )

    def send(self, message: object) -> None:
        try:
            self._process.channel.send(pickle.dumps(message))
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> object:
        try:
            return pickle.loads(self._process.channel.receive())
        except EOFError:
            raise self._died() from None

    def _died(self) -> ChildProcessError:
        ending = self._process.ending()
        return ChildProcessError(
            f"worker {self.index} (process {ending.pid}) {ending}; with workers = 1 there is no other process"
        )

    def close(self) -> None:
        self._process.close()


def serve(channel: Channel) -> None:
    """What the process of another worker runs: it answers until the caller closes the channel."""
    with suppress(EOFError, BrokenPipeError):  # the caller has ended, so nobody waits for an answer
        host = pickle.loads(channel.receive())()
        while True:
            work, item = pickle.loads(channel.receive())
            channel.send(_pickled(attempt(work, host, item)))


def _pickled(result: object) -> bytes:
    """The result as bytes, by plain pickle: multiprocessing's pickler would send tensors as descriptors."""
    if isinstance(result, Failure):
        origin = "in another worker:\n" + "".join(traceback.format_exception(result.error))
        result.error.add_note(origin)
        try:
            pickle.loads(pickle.dumps(result))
        except Exception:
            result = Failure(RuntimeError(origin))
    return pickle.dumps(result)
