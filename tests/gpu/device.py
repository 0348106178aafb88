"""What the tests of this folder share: the fake device, a small model on it, and planted faults."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from zerokl.benchmarks.machine import model_config
from zerokl.kernels.launch import Launch, launch, recorded_launches
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.sizes import Experts
from zerokl.model.weights import Layout

from tests.gpu.cuda_graph import Graph, torch_cuda
from tests.gpu.fake_cuda import CUDA, META, FakeCuda, zeros
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
    """A decoder on the device."""
    config = model_config("Qwen3", 64, 96, 4, 2, 64, layers=layers, vocab=VOCABULARY, context=256)
    config = config if experts is None else with_experts(config, experts)
    layout = Layout(config)
    flat = torch.zeros(layout.numel, dtype=dtype, device=CUDA)
    return Decoder(config, flat, layout, numerics, **options)


def plant(patch: pytest.MonkeyPatch, module: ModuleType, text: str, fault: str) -> str:
    """Replace `text` in the source of a module by `fault`; only the function around it is made anew.

    Returns file:line of the fault, as events and tracebacks show it. `text` must occur once.
    """
    path = Path(inspect.getsourcefile(module))
    source = path.read_text()
    assert source.count(text) == 1, f"{path} has {source.count(text)} times {text!r}"
    line = source[: source.index(text)].count("\n") + 1
    tree, owner = ast.parse(source.replace(text, fault)), module
    while True:
        node = next(n for n in tree.body if n.lineno <= line <= n.end_lineno)
        if isinstance(node, ast.FunctionDef):
            break
        tree, owner = node, getattr(owner, node.name)
    made: dict[str, object] = {}
    exec(compile(ast.Module([node], []), str(path), "exec"), vars(module), made)
    patch.setattr(owner, node.name, made[node.name])
    return f"{'/'.join(path.parts[-len(module.__name__.split('.')) + 1 :])}:{line}"
