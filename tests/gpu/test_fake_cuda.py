"""The fake device sees every copy and every wait, and its graphs replay what was captured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.gpu.cuda_graph import FreedMemoryError, Graph
from tests.gpu.device import Device, fake_cuda
from tests.gpu.fake_cuda import CPU, CUDA, META, FakeCuda

MEMORIES = pytest.mark.parametrize("memory", [META, CPU], ids=str)
HOST = torch.arange(3)
WAITS = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool(x.any()),
    "int()": lambda x: int(x[0]),
    "a list": lambda x: x.tolist(),
    "cpu()": lambda x: x.cpu(),
    "to(cpu)": lambda x: x.to("cpu", torch.float64),
    "to(device=cpu)": lambda x: x.to(device=CPU),
    "copy_ to the host": lambda x: torch.empty(3).copy_(x),
    "reading by a mask": lambda x: x[x > 1],
    "writing by a mask": lambda x: x.index_put_((x > 1,), x[0] * 2),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "an event's synchronize": lambda x: torch.cuda.Event().synchronize(),
}
COPIES = {
    "new_tensor": lambda x: x / x.new_tensor(0.7),
    "torch.tensor": lambda x: torch.tensor([1.0], device=x.device),
    "as_tensor": lambda x: torch.as_tensor(1.0, device=x.device),
    "to(cuda)": lambda x: HOST.to(x.device),
    "to(cuda) of memory that is not pinned": lambda x: HOST.to(x.device, non_blocking=True),
    "copy_ to the device": lambda x: x.copy_(HOST),
    "assignment": lambda x: x.__setitem__(slice(None), HOST.float()),
    "reading by a list": lambda x: x[[0, 2]],
    "reading by an array": lambda x: x[np.array([0, 2])],
    "reading by a tensor of the host": lambda x: x[HOST],
    "writing by a list": lambda x: x.__setitem__([0, 2], 1.0),
}
UPLOADS = {
    "to(cuda)": lambda x: HOST.pin_memory().to(x.device, non_blocking=True),
    "copy_": lambda x: x.copy_(HOST.pin_memory(), non_blocking=True),
    "memory that was made pinned": lambda x: x[1:].copy_(
        torch.empty(3, pin_memory=True)[1:], non_blocking=True
    ),
    "to(cpu)": lambda x: x.to("cpu", non_blocking=True),
    "copy_ to pinned memory": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
}
NOTHING = {
    "arithmetic": lambda x: (x / 0.7 + 1).softmax(0).sort().values.masked_fill(x > 2, 0.0),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "numbers that are filled in": lambda x: x.new_full((), 0.7) + torch.arange(3, device=x.device),
    "assignment of a number": lambda x: x.__setitem__(0, 5.0),
    "another dtype, and the same device": lambda x: x.to(CUDA, torch.float64).to(x.device),
    "work of the host": lambda x: HOST.sum().item(),
    "rows by numbers of the device": lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)],
}
WAYS = [
    pytest.param(kind, act, id=f"{kind}: {name}")
    for kind, acts in (("wait", WAITS), ("copy", COPIES), ("upload", UPLOADS), ("", NOTHING))
    for name, act in acts.items()
]


@contextmanager
def device_with(memory: torch.device) -> Iterator[tuple[Device, torch.Tensor]]:
    """The device, and a tensor on it."""
    device = Device(FakeCuda(memory))
    with fake_cuda(device):
        yield device, torch.full((3,), 2.0, device=CUDA)


@MEMORIES
@pytest.mark.parametrize(("kind", "act"), WAYS)
def test_copies_and_waits_are_seen(memory, kind, act: Callable):
    with device_with(memory) as (device, x):
        act(x)
        assert {event.kind for event in device.cuda.events} == ({kind} if kind else set())


@MEMORIES
def test_what_a_gpu_refuses_is_refused(memory):
    with device_with(memory) as (_, x):
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(x)
        with pytest.raises(RuntimeError, match="on the host"):
            x + torch.ones(3)


def test_memory_of_the_cpu_has_the_numbers_of_the_host():
    def numbers(x: torch.Tensor) -> list[float]:
        x = x.clone()
        x[0], x[1:] = 5.0, x[:2] * 1.0
        return [*x.tolist(), *x[x > 2].cumsum(0).tolist(), x.max().item()]

    with device_with(CPU) as (_, x):
        there = numbers(torch.arange(3.0).to(x.device))
    assert there == numbers(torch.arange(3.0)) == [5.0, 0.0, 1.0, 5.0, 5.0]


def _captured(work: Callable[[], None]) -> Graph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_a_graph_replays_what_was_captured():
    with device_with(CPU) as (device, x):
        result, factor = torch.zeros(3, device=CUDA), 2.0

        def work() -> None:
            y = x.view(3, 1).expand(3, 2) * factor
            y[1] += x[0]
            result.copy_(torch.cat([y.sum(1), x])[:3])

        graph = _captured(work)
        assert result.tolist() == [0.0, 0.0, 0.0], "a capture carries nothing out"
        factor = 100.0  # Python does not run again
        for values, expected in (([1.0, 2.0, 3.0], [4.0, 10.0, 12.0]), ([0.0, 1.0, 0.0], [0.0, 4.0, 0.0])):
            x.copy_(torch.tensor(values))
            graph.replay()
            assert result.tolist() == expected
        assert graph.replays == 2
        assert not [event for event in device.cuda.events if event.captured]


def test_what_the_host_does_in_a_capture_is_marked():
    with device_with(CPU) as (device, x):
        _captured(lambda: x.copy_(HOST))
        x.copy_(HOST)
        assert [event.captured for event in device.cuda.events] == [True, False]


@pytest.mark.parametrize("made", [lambda x: x * 3, lambda x: x.sum()], ids=["three numbers", "one number"])
def test_a_graph_does_not_keep_memory_alive(made):
    with device_with(CPU) as (_, x):
        outside, result = [made(x)], torch.zeros(3, device=CUDA)
        graph = _captured(lambda: result.copy_(outside[0] + x))
        graph.replay()
        assert result.tolist() == [8.0, 8.0, 8.0]
        outside.clear()
        with pytest.raises(FreedMemoryError):
            graph.replay()
