"""What the tests of this folder share: the fake device, a small model on it, and planted faults."""

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from zerokl.benchmarks.machine import model_config
from zerokl.kernels import upload
from zerokl.kernels.launch import Launch, launch, recorded_launches
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.sizes import Experts
from zerokl.model.weights import Layout

from tests.gpu.cuda_graph import Graph, torch_cuda
from tests.gpu.fake_cuda import CUDA, META, PACKAGE_ROOT, Event, FakeCuda, zeros
from tests.gpu.without_triton import kernels_without_triton
from tests.helpers import with_experts

VOCABULARY = 96


@dataclass
class Device:
    """The fake device. launches: all that were made, none of them carried out."""

    cuda: FakeCuda
    captures: list[Graph] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    free_bytes: int = 80 << 30

    def places(self, *kinds: str, captured: bool = False) -> set[str]:
        """`file: function` of the events of these kinds."""
        events = self.cuda.events
        return {f"{e.file}: {e.function}" for e in events if e.kind in kinds and e.captured == captured}

    def in_graphs(self) -> list[str]:
        """What the host did inside captures, a line each."""
        return [str(e) for e in self.cuda.events if e.captured]


@contextmanager
def fake_cuda(device: Device) -> Iterator[None]:
    """Inside, torch has the device, and torch.cuda is the device's."""
    with pytest.MonkeyPatch.context() as patch:
        offered = torch_cuda(device.cuda, device.captures, lambda: device.free_bytes)
        for name, value in offered.items():
            patch.setattr(torch.cuda, name, value)
        for name in ("numpy", "tolist"):  # torch shows nobody that they read memory
            patch.setattr(torch.Tensor, name, _seen(getattr(torch.Tensor, name), device.cuda))
        with device.cuda:
            yield


def _seen(method: Callable[..., Any], cuda: FakeCuda) -> Callable[..., Any]:
    def read(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        cuda.timeline.host_uses(x)
        return method(x, *args, **options)

    return read


@contextmanager
def gpu(target: str = "sm_90", answer: Callable[[torch.Tensor], torch.Tensor] = zeros) -> Iterator[Device]:
    """A device without numbers: launches are recorded, and what is read back is `answer`'s."""
    device = Device(FakeCuda(META, answer))
    recording = recorded_launches()
    with kernels_without_triton(), tiles_of_target(target), recording as device.launches, fake_cuda(device):
        yield device


@contextmanager
def watched_gpu() -> Iterator[Device]:
    """As `gpu`, but a launch is only seen by the timeline. So tensors die as they do on a GPU."""
    with gpu() as device, pytest.MonkeyPatch.context() as patch:

        def seen(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            device.cuda.launch(args)

        for module in list(sys.modules.values()):
            if getattr(module, "launch", None) is launch and module.__name__.endswith("_triton"):
                patch.setattr(module, "launch", seen)
        yield device


def model(
    dtype: torch.dtype,
    numerics: Numerics = COMPUTE,
    layers: int = 2,
    experts: Experts | None = None,
    **options: bool,
) -> Decoder:
    """A decoder of Qwen3's kind on the device."""
    config = model_config("Qwen3", 64, 96, 4, 2, 64, layers=layers, vocab=VOCABULARY, context=256)
    config = config if experts is None else with_experts(config, experts)
    return model_of(config, dtype, numerics, **options)


def model_of(
    config: ModelConfig, dtype: torch.dtype, numerics: Numerics = COMPUTE, **options: bool
) -> Decoder:
    """A decoder on the device."""
    layout = Layout(config)
    flat = torch.zeros(layout.numel, dtype=dtype, device=CUDA)
    return Decoder(config, flat, layout, numerics, **options)


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Put `fault` in the place of `name`, a function of a module or a method of a class.

    A call of it is fault(plain, *args), where `plain` is what was there. What a fault does to the device is
    an event of the line that calls it.
    """
    static = inspect.getattr_static(owner, name)
    plain = static.fget if isinstance(static, property) else getattr(owner, name)

    def faulty(*args: Any, **options: Any) -> Any:
        return fault(plain, *args, **options)

    is_kept = isinstance(static, (staticmethod, property))
    patch.setattr(owner, name, type(static)(faulty) if is_kept else faulty)


class _Torch:
    """torch, but for some functions."""

    def __init__(self, **functions: Callable[..., Any]):
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def plant_in_torch(patch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]) -> None:
    """Give a module other functions under their names in torch."""
    patch.setattr(module, "torch", _Torch(**functions))


@dataclass
class _Host:
    """Memory of the host that upload.py packs. sent: how it goes to a device."""

    memory: torch.Tensor
    sent: Callable[[torch.Tensor, torch.device], torch.Tensor]

    def numpy(self) -> Any:
        return self.memory.numpy()

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        return self.sent(self.memory, device)


def send(patch: pytest.MonkeyPatch, sent: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> None:
    """Let upload.py send what it has packed in another way: sent(host, device) is the copy on the device."""
    plant_in_torch(patch, upload, empty=lambda *shape, **options: _Host(torch.empty(*shape, **options), sent))


class Fault(NamedTuple):
    """What the host may not do, planted, and the event that tells it."""

    plant: Callable[[pytest.MonkeyPatch], None]
    place: str  # file: function
    line: str  # what stands in the line
    kind: str

    def named(self, event: Event) -> bool:
        """Whether the event has the file and the line of the fault."""
        line = linecache.getline(str(PACKAGE_ROOT / event.file), event.line)
        is_there = f"{event.file}: {event.function}" == self.place and self.line in line
        return is_there and event.kind == self.kind


def as_if_weights_never_moved(plain: Callable[..., None], rows: Any, packed: Any) -> None:
    """A fault of DecodeRows.start: graphs are kept that read the weights where they lay before."""
    if rows._graphs:
        rows._flat_address = rows.decoder.flat.data_ptr()
    plain(rows, packed)


def as_if_the_table_moved(plain: Callable[..., None], rows: Any, *args: Any) -> None:
    """A fault of DecodeRows._write: the rows go to another tensor than the graphs read."""
    rows.memory.table = rows.memory.table.clone()
    plain(rows, *args)
