"""Nobody uses memory too long: training passes, updates, sampling and graphs on a fake GPU (timeline.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from zerokl.engine.config.run_config import OptimizerConfig
from zerokl.engine.rollout import decode
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.train.master_weights import SlicedWeights
from zerokl.engine.train.optimizer import Optimizer
from zerokl.engine.train.parallel import scorer, tree_hash
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.kernels import to_host
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.decoder import Decoder

from tests.gpu.device import (
    Device,
    as_if_the_table_moved,
    as_if_weights_never_moved,
    fake_cuda,
    model,
    plant,
    plant_in_torch,
    send,
    watched_gpu,
)
from tests.gpu.fake_cuda import CUDA, META, FakeCuda
from tests.gpu.test_passes import SCALED, SETTINGS, Setting, make_shard
from tests.gpu.test_turns import BOTH, NUMERICS, generate
from tests.gpu.timeline import Event, Stream
from tests.helpers import DTYPES

PROMPTS = [[20] * 40, [30, 31]]


def train(
    decoder: Decoder, in_flight: int, setting: Setting = SETTINGS["plain"], passes: int = 2
) -> ShardSum:
    """Passes over `in_flight` shards each; the sum of their gradients."""
    total = ShardSum(decoder, passes * in_flight, in_flight)
    shards = range(passes * in_flight)
    total.add(setting.work, [make_shard(i, setting.with_ref, setting.with_old) for i in shards])
    return total


def trained(
    in_flight: int, setting: Setting = SETTINGS["plain"], dtype: torch.dtype = torch.bfloat16
) -> Device:
    with watched_gpu() as device:
        train(model(dtype, recompute=setting.recompute), in_flight, setting)
    return device


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_passes_use_no_memory_too_long(dtype, in_flight, setting):
    device = trained(in_flight, SETTINGS[setting], dtype)
    assert device.cuda.timeline.faults == []
    assert {event.kind for event in device.cuda.events} == {"upload", "wait"}


def test_a_scaled_pass_uses_no_memory_too_long():
    assert trained(4, SCALED, torch.float16).cuda.timeline.faults == []


def test_a_reference_that_scores_uses_no_memory_too_long():
    rollouts = [r for i in range(3) for r in make_shard(i).rollouts]
    with watched_gpu() as device:
        scorer.frozen(model(torch.bfloat16), 1, 1, 4).score(rollouts, SamplingParams())
    assert device.cuda.timeline.faults == []


def sampled(noise: float = 0.0, numerics: str = "compute") -> Device:
    with watched_gpu() as device:
        generate(model(torch.bfloat16, NUMERICS[numerics]), BOTH, noise)
    return device


@pytest.mark.parametrize("numerics", NUMERICS)
def test_turns_with_looks_ahead_use_no_memory_too_long(numerics):
    device = sampled(numerics=numerics)
    assert device.cuda.timeline.faults == []
    (graph,) = device.captures
    assert graph.replays >= 10


def test_turns_without_graphs_use_no_memory_too_long():
    device = sampled(noise=0.1)
    assert device.cuda.timeline.faults == []
    assert device.captures == []


def steps(move: bool, numerics: str = "compute") -> Device:
    """Steps of sampling, training, an update, digests, and sampling with the new weights.

    move: the weights move to other memory between two steps.
    """
    with watched_gpu() as device:
        decoder = model(torch.bfloat16, NUMERICS[numerics])
        sampler = NativeSampler(decoder)
        optimizer = Optimizer(SlicedWeights(decoder, torch.zeros(decoder.layout.numel)), OptimizerConfig(), 9)
        for step, prompts in enumerate((PROMPTS, PROMPTS, [[20] * 90, [3], [4], [5]])):
            for sampling_params in (SamplingParams(), BOTH):
                params = GenerationParams(sampling_params, 2, 11, frozenset({1, 2}))
                complete(sampler, prompts, params, RngKey(1, step))
            optimizer.update(train(decoder, 2).tree.take())
            tree_hash.hash_tree(decoder.layout.blocks, optimizer.weights.master)
            if move:
                decoder.move_to(torch.empty_like(decoder.flat.detach()))
            sampler.sync_weights(step + 1)
    return device


@pytest.mark.parametrize("numerics", ["compute", "lm_head fp32"])
@pytest.mark.parametrize(
    "move", [pytest.param(False, marks=pytest.mark.full, id="in place"), pytest.param(True, id="moved")]
)
def test_steps_with_updates_and_graphs_of_earlier_steps_use_no_memory_too_long(move, numerics):
    device = steps(move, numerics)
    assert device.cuda.timeline.faults == []
    assert sum(graph.replays for graph in device.captures) > 50


def aside(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a stream of its own, for which nobody waits."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return host.to(device, non_blocking=True)


def in_order(host: torch.Tensor, device: torch.device, record: bool = False) -> torch.Tensor:
    """A copy on a stream of its own, for which the current one waits."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_device = host.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    if record:
        on_device.record_stream(torch.cuda.current_stream())
    return on_device


def then_changed(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    on_device = host.to(device, non_blocking=True)
    host.numpy()[0] ^= 1
    return on_device


def from_memory_of_numpy(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    unknown = torch.empty(len(host) + 16, dtype=torch.uint8, pin_memory=True).numpy()[16:]
    return torch.from_numpy(unknown).to(device, non_blocking=True)


def does_not_wait(is_waiting: Callable[[Stream], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Streams for which this holds wait for no other one."""

    def wait_stream(plain, self, other):
        if not is_waiting(self):
            plain(self, other)

    return lambda patch: plant(patch, Stream, "wait_stream", wait_stream)


class _Unread:
    """Bytes of a device that are read without a wait."""

    def __init__(self, x: torch.Tensor):
        self.cpu = lambda: x.to("cpu", non_blocking=True)


def reads_outside_of_the_graph(patch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw_tokens(plain, *args):
        drawn.append(plain(*args))
        return drawn[-1]

    def look(plain, self, turns):
        drawn[-1][0].sum()
        return plain(self, turns)

    plant(patch, decode, "draw_tokens", draw_tokens)
    plant(patch, decode.DecodeRows, "_look", look)


def nothing(plain, *args) -> None:
    """In the place of a call that is left out."""


class Fault(NamedTuple):
    """What may not be, planted, and what is said of it."""

    run: Callable[[], Device]
    plant: Callable[[pytest.MonkeyPatch], None]
    message: str


FAULTS = {
    "a side stream that waits for nothing": Fault(
        sampled,
        does_not_wait(lambda stream: stream is not torch.cuda.current_stream()),
        "another one that writes it may not have ended",
    ),
    "a capture that does not wait for the side stream": Fault(
        sampled,
        does_not_wait(lambda stream: stream is torch.cuda.current_stream()),
        "another one that writes it may not have ended",
    ),
    "an upload on another stream that nobody waits for": Fault(
        lambda: trained(1), lambda patch: send(patch, aside), "another one that writes it may not have ended"
    ),
    "an upload on another stream without record_stream": Fault(
        lambda: trained(1), lambda patch: send(patch, in_order), "died, and another stream may still use it"
    ),
    "packed memory that is written after its copy was begun": Fault(
        lambda: trained(1), lambda patch: send(patch, then_changed), "was changed before the copy from it"
    ),
    "packed memory that torch does not know": Fault(
        lambda: trained(1),
        lambda patch: send(patch, from_memory_of_numpy),
        "was freed before the copy from it had ended",
    ),
    "a look that is read before it has arrived": Fault(
        sampled,
        lambda patch: plant(
            patch, decode.Look, "arrays", lambda plain, look: [x.numpy() for x in look._columns]
        ),
        "the host uses memory before the copy into it has ended",
    ),
    "results that are read before they have arrived": Fault(
        lambda: trained(1),
        lambda patch: plant_in_torch(patch, to_host, cat=lambda parts: _Unread(torch.cat(parts))),
        "the host uses memory before the copy into it has ended",
    ),
    "a look that waits for an event of before the copy": Fault(
        sampled,
        lambda patch: plant(patch, Event, "record", nothing),
        "the host uses memory before the copy into it has ended",
    ),
    # Without a copy of lm_head in another dtype, the graphs' owner keeps the old weights alive.
    "graphs that are kept though the weights moved": Fault(
        lambda: steps(True, "lm_head fp32"),
        lambda patch: plant(patch, decode.DecodeRows, "start", as_if_weights_never_moved),
        "a graph needs memory that was freed: torch.bfloat16",
    ),
    "a table that is written to another tensor": Fault(
        sampled,
        lambda patch: plant(patch, decode.DecodeRows, "_write", as_if_the_table_moved),
        "a graph needs memory that was freed: torch.int32",
    ),
    "numbers of a graph that are read outside of it": Fault(
        sampled, reads_outside_of_the_graph, "belongs to a graph, whose next replay writes over it"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_a_fault_is_named(name, monkeypatch):
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    faults = fault.run().cuda.timeline.faults
    assert any(fault.message in line for line in faults), faults


def test_an_upload_on_another_stream_may_be_in_order_and_recorded(monkeypatch):
    send(monkeypatch, partial(in_order, record=True))
    assert trained(4).cuda.timeline.faults == []


@contextmanager
def two_streams() -> Iterator[tuple[Device, torch.cuda.Stream]]:
    """The device, and a stream beside the current one."""
    device = Device(FakeCuda(META))
    with fake_cuda(device):
        yield device, torch.cuda.Stream()


def _number(side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        torch.zeros(1, device=CUDA).item()


def _through_a_third(main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    third = torch.cuda.Stream()
    third.wait_stream(side)
    main.wait_stream(third)


# What may order the first stream after the second one, and whether it does.
WAYS = {
    "nothing": (lambda main, side: None, False),
    "an event of the wrong stream": (lambda main, side: main.wait_event(main.record_event()), False),
    "the other way round": (lambda main, side: side.wait_stream(main), False),
    "an event that was not recorded": (lambda main, side: main.wait_event(torch.cuda.Event()), False),
    "wait_stream": (lambda main, side: main.wait_stream(side), True),
    "wait_event": (lambda main, side: main.wait_event(side.record_event()), True),
    "an event's wait": (lambda main, side: side.record_event().wait(), True),
    "the host waits for the stream": (lambda main, side: side.synchronize(), True),
    "the host waits for an event": (lambda main, side: side.record_event().synchronize(), True),
    "the host asks an event": (lambda main, side: side.record_event().query(), True),
    "the host waits for the device": (lambda main, side: torch.cuda.synchronize(), True),
    "the host reads a number": (lambda main, side: _number(side), True),
    "a third stream between them": (_through_a_third, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_orders_two_streams(way):
    order, is_ordered = WAYS[way]
    with two_streams() as (device, side):
        main, x = torch.cuda.current_stream(), torch.zeros(3, device=CUDA)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.mul_(2.0)
        order(main, side)
        x.sum()
        faults = device.cuda.timeline.faults
    unordered = "a stream reads torch.float32 [3], and another one that writes it may not have ended"
    assert [line.partition(": ")[2] for line in faults] == ([] if is_ordered else [unordered])


@pytest.mark.parametrize("way", WAYS)
def test_what_lets_memory_die_that_another_stream_reads(way):
    order, is_ordered = WAYS[way]
    with two_streams() as (device, side):
        main, x = torch.cuda.current_stream(), torch.zeros(3, device=CUDA)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.sum()
        order(main, side)
        view = x[1:]
        del x
        assert device.cuda.timeline.faults == [], "a view keeps memory alive"
        del view
        faults = device.cuda.timeline.faults
    assert ["died, and another stream may still use it" in line for line in faults] == [True] * (
        not is_ordered
    )


def test_memory_that_another_stream_reads_may_not_be_written():
    with two_streams() as (device, side):
        x = torch.zeros(3, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        x.sum()
        assert device.cuda.timeline.faults == [], "both may read"
        x.zero_()
        (line,) = device.cuda.timeline.faults
    assert line.endswith("and another one that reads it may not have ended")


def test_graphs_of_one_pool_take_turns():
    with two_streams() as (device, side):
        x, pool = torch.zeros(3, device=CUDA), torch.cuda.graph_pool_handle()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:
            with torch.cuda.graph(graph, pool=pool):
                torch.zeros(3, device=CUDA).sum()
        del x
        graphs[0].replay()
        with torch.cuda.stream(side):
            graphs[1].replay()
        (line,) = device.cuda.timeline.faults
    assert "a graph's memory" in line


def test_pinned_memory_is_torchs_until_the_copy_has_ended():
    with two_streams() as (device, _):
        host = torch.zeros(8).pin_memory()
        x = host.to(CUDA, non_blocking=True)
        del host
        assert device.cuda.timeline.faults == []
        host = torch.zeros(8).pin_memory()
        x.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        host.fill_(1.0)
    assert device.cuda.timeline.faults == []


@pytest.mark.parametrize("offset", [0, 1])
def test_memory_that_numpy_shows_is_torchs_by_its_first_address(offset):
    with two_streams() as (device, _):
        host = torch.zeros(8).pin_memory()
        shown = torch.from_numpy(host.numpy()[offset:])
        shown.to(CUDA, non_blocking=True)
        assert device.cuda.events[-1].kind == "upload", "CUDA knows pinned memory by its address"
        del host, shown
    assert ["was freed before the copy" in line for line in device.cuda.timeline.faults] == [True] * offset


USES = {
    "numpy": lambda x: x.numpy(),
    "numpy's array": np.asarray,
    "a list": lambda x: x.tolist(),
    "a number": lambda x: x[0].item(),
    "arithmetic": lambda x: x + 1,
    "writing": lambda x: x.fill_(1.0),
    "a part": lambda x: x[1:].numpy(),
}


@pytest.mark.parametrize("name", USES)
def test_a_copy_to_the_host_is_there_after_a_wait_only(name):
    with two_streams() as (device, _):
        for waits in (True, False):
            x = torch.ones(3, device=CUDA).to("cpu", non_blocking=True)
            if waits:
                torch.cuda.synchronize()
            USES[name](x)
            assert len(device.cuda.timeline.faults) == (not waits)
    assert "the host uses memory before the copy into it" in device.cuda.timeline.faults[0]
