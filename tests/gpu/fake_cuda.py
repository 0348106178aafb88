"""A CUDA device that is not there: what the host does to it is watched.

Tensors on the host are torch's own. A tensor on the device says that it lies on CUDA. Its memory is of
torch's device "meta", which has shapes and no numbers, or of the CPU. Each operation is seen before it is
carried out. These are named with file and line:

    copy    from the host to the device, waiting for the stream: all copies of memory that is not pinned
    upload  between host and device, without waiting
    wait    the host waits for the device: a copy back, a number that is read, a shape that depends on
            numbers, a synchronisation

A CUDA graph can hold none of them (cuda_graph.py). Who uses memory too long is found as well (timeline.py).

Python sees the device CUDA and torch's C++ code sees the memory's. (Where C++ sees CUDA, a torch without CUDA
cannot run a backward.) So DeviceTensor does itself what C++ would decide by the device.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.gpu.timeline import Clock, Stream, Timeline

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
_FOLDERS = ("engine", "kernels", "model", "verify", "files")  # of the package's own code
aten = torch.ops.aten
# Operations whose result the host reads, or whose result's shape depends on numbers.
_WAITS = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten.unique_dim,
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Event(NamedTuple):
    """What the host did to the device."""

    kind: str  # copy, upload or wait
    operation: str
    file: str  # relative to the repository root
    line: int
    function: str  # with its class
    captured: bool  # inside the capture of a CUDA graph

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function}): {self.kind} by {self.operation}"


class Capture(Protocol):
    """Takes what a CUDA graph holds, instead of carrying it out."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take an operation on the memory, and return its results, whose numbers do not count."""
        ...

    def launch(self, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Take the launch run(*args), whose tensors are memory."""
        ...


class DeviceTensor(torch.Tensor):
    """A tensor on the fake device. The operations on it are FakeCuda's."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor on the fake device, outside of the device")

    @classmethod
    def over(cls, memory: torch.Tensor) -> "DeviceTensor":
        """The tensor on the device that has this memory."""
        return torch.Tensor._make_subclass(cls, memory)

    def data_ptr(self) -> int:
        """The address. Storages of "meta" have none, and get one each."""
        storage = self.untyped_storage()
        offset = self.storage_offset() * self.element_size()
        return (storage._cdata << 8 if storage.device == META else storage.data_ptr()) + offset

    def __repr__(self) -> str:
        return f"DeviceTensor({[*self.shape]}, {self.dtype})"

    def cpu(self) -> torch.Tensor:
        """A copy on the host."""
        return aten._to_copy(self, device=CPU)

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        """A copy of another dtype or on the host, or this tensor."""
        named = [torch.device(x) for x in args if isinstance(x, (torch.device, str))]
        args = tuple(x for x in args if not isinstance(x, (torch.device, str)))
        named += [torch.device(options.pop("device"))] if options.get("device") else []
        if named and named[0].type == "cpu":
            options.pop("copy", None)  # it is always one
            options |= {"dtype": args[0]} if args else {}
            return aten._to_copy(self, device=CPU, **options)
        return super().to(*args, **options) if args or options else self

    def record_stream(self, stream: Stream) -> None:
        """Keep the memory for the stream's work, too, when it dies."""
        stream.record(self)

    def tolist(self) -> Any:
        """Its numbers on the host."""
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> np.ndarray:
        """As of any tensor on CUDA."""
        raise TypeError(f"can't convert {CUDA} device type tensor to numpy")

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        """A copy of numbers of the host, in the dtype of this tensor."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):  # CUDA fills
            value = torch.full((), value, dtype=self.dtype, device=CUDA)
        super().__setitem__(_index(index), value)


def _index(index: Any) -> Any:
    """An index with its lists and arrays as tensors on the device."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return torch.tensor(index, device=CUDA) if isinstance(index, (list, np.ndarray)) else index


def _on_device(x: torch.Tensor) -> bool:
    return isinstance(x, DeviceTensor) or x.is_meta  # C++ makes some tensors of "meta" itself


def zeros(x: torch.Tensor) -> torch.Tensor:
    """The answer to whoever reads x [...] back from a device without numbers."""
    return torch.zeros(x.shape, dtype=x.dtype)


class FakeCuda(TorchDispatchMode):
    """The fake device: inside it, torch can use the device `CUDA`.

    memory: META or CPU. answer: with META, the numbers of a tensor that is read back, in its shape and dtype.
    events: in their order. capture: that which is going on. timeline: who uses memory, and in which order.
    """

    # torch does not try to start CUDA where a mode of this key is active.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, memory: torch.device = META, answer: Callable[[torch.Tensor], torch.Tensor] = zeros):
        super().__init__()
        self.events: list[Event] = []
        self.capture: Capture | None = None
        self.memory, self._answer = memory, answer
        self.timeline = Timeline(lambda: "{}:{} ({})".format(*_place()))

    def __enter__(self) -> "FakeCuda":
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor shows its copy to a device
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        self.timeline.synchronize()

    def note(self, kind: str, operation: str, until: Clock | None = None) -> None:
        """Add an event at the innermost line of the package.

        Where it is no upload, the host waits: until then, or for all of the current stream.
        """
        self.events.append(Event(kind, operation, *_place(), self.capture is not None))
        if kind != "upload":
            self.timeline.host_learns(self.timeline.current.knows if until is None else until)

    def launch(self, args: tuple[Any, ...]) -> None:
        """A launch with these arguments, which is not carried out."""
        if self.capture is not None:
            self.capture.launch(lambda *_: None, tree_map_only(DeviceTensor, memory_of, args))
        else:
            self.timeline.operation((), pointers(args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        target = torch.device(kwargs["device"]).type if kwargs.get("device") else None
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = list(map(_on_device, read))
        if not any(there):
            return self._of_host(func, args, kwargs, target)
        if packet is aten._to_copy and target == "cpu":
            return self._to_host(args[0], kwargs.get("dtype"), bool(kwargs.get("non_blocking")))
        if packet is aten.copy_ and there[0] != there[1]:
            return self._copy(*args)
        if packet in _WAITS:
            self.note("wait", packet.__name__)
            if packet is aten._local_scalar_dense:
                return self._numbers(args[0]).item()
        if packet in _INDEXED:
            args = (args[0], [self._places(packet.__name__, x) for x in args[1]], *args[2:])
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.dim() and not _on_device(x):
                raise RuntimeError(f"{func}: tensors on {CUDA}, and one of {[*x.shape]} on the host")
        return self._compute(func, args, kwargs)

    def _of_host(self, func: Any, args: Any, kwargs: dict[str, Any], target: str | None) -> Any:
        """An operation whose operands all lie on the host. Its result may lie on the device."""
        packet = func.overloadpacket
        if target in ("cuda", "meta"):
            is_copy = packet is aten._to_copy
            return self._upload(*args, **kwargs) if is_copy else self._compute(func, args, kwargs)
        if packet is aten.is_pinned:
            return self.timeline.is_pinned(args[0])
        if not func.is_view:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor):
                    self.timeline.host_uses(x)
        if packet is aten._pin_memory:
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _pin(self, x: torch.Tensor) -> torch.Tensor:
        """Remember that the memory of x is pinned."""
        self.timeline.pin(x)
        return x

    def _upload(
        self, x: torch.Tensor, dtype: torch.dtype | None = None, non_blocking: bool = False, **rest: Any
    ) -> torch.Tensor:
        """A copy of x, which lies on the host, on the device."""
        there = DeviceTensor.over(x.to(self.memory, dtype or x.dtype, copy=True))
        self._send(there, x, non_blocking, "_to_copy")
        return there

    def _to_host(self, x: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        """A copy of x, which lies on the device. torch makes pinned memory for one that does not wait."""
        numbers = self._numbers(x).to(dtype or x.dtype)
        if not non_blocking:
            self.timeline.operation((x,))
            self.note("wait", "_to_copy")
            return numbers
        self.note("upload", "_to_copy")
        to = self._pin(torch.empty_like(numbers, memory_format=torch.contiguous_format))
        self.timeline.download(to, x, numbers)
        return to

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """copy_ between host and device."""
        if not isinstance(source, DeviceTensor):
            memory_of(to).copy_(source)
            self._send(to, source, non_blocking, "copy_")
            return to
        numbers = self._numbers(source)
        # Where the rows have gaps, torch waits for a copy without gaps.
        if non_blocking and to.is_contiguous() and self.timeline.is_pinned(to):
            self.note("upload", "copy_")
            self.timeline.download(to, source, numbers)
            return to
        self.timeline.operation((source,))
        self.note("wait", "copy_")
        return to.copy_(numbers)

    def _send(self, to: torch.Tensor, host: torch.Tensor, non_blocking: bool, operation: str) -> None:
        """A copy of `host` to the device, whose numbers are there already."""
        # torch first copies rows with gaps to memory that is not pinned.
        if non_blocking and host.is_contiguous() and self.timeline.is_pinned(host):
            self.note("upload", operation)
            self.timeline.upload(host, to)
        else:
            self.timeline.operation((), (to,))
            self.note("copy", operation)

    def _places(self, name: str, index: torch.Tensor | None) -> torch.Tensor | None:
        """An index on the device and without masks. With META a mask selects all elements."""
        if index is None:
            return None
        if index.dim() and not _on_device(index):
            index = self._upload(index)
        if index.dtype not in (torch.bool, torch.uint8):
            return index
        self.note("wait", f"{name} with a mask")
        assert index.dim() == 1, "a mask of several axes"
        if self.memory == META:
            return DeviceTensor.over(torch.arange(len(index), device=META))
        return DeviceTensor.over(memory_of(index).nonzero()[:, 0])

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of x on the host."""
        return self._answer(x) if self.memory == META else memory_of(x).clone()

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results of an operation on the device. One in place returns its operand."""
        if "device" in kwargs:
            kwargs = kwargs | {"device": self.memory}
        on_memory = tree_map_only(DeviceTensor, memory_of, (args, kwargs))
        if func.is_view:
            out = func(*on_memory[0], **on_memory[1])
        elif self.capture is None:
            out = func(*on_memory[0], **on_memory[1])
            read, written = _read_and_written(func, args, kwargs)
            made = () if func._schema.is_mutable else filter(_is_tensor, tree_leaves(out))
            self.timeline.operation(read, written, made)
        else:
            out = self.capture.operation(func, *on_memory)
        if func._schema.is_mutable:
            return args[0] if isinstance(out, torch.Tensor) else out
        return tree_map_only(torch.Tensor, DeviceTensor.over, out)


def _place() -> tuple[str, int, str]:
    """File, line and function of the innermost line of the package."""
    frame = sys._getframe(1)
    while frame is not None:
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if path.is_relative_to(PACKAGE_ROOT) and path.relative_to(PACKAGE_ROOT).parts[0] in _FOLDERS:
            function = code.co_qualname.partition(".<locals>")[0]
            return str(path.relative_to(PACKAGE_ROOT)), frame.f_lineno, function
        frame = frame.f_back
    return "", 0, ""


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _read_and_written(
    func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operands on the device that an operation reads, and those that it writes."""
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors[is_written].extend(x for x in tree_leaves(value) if _is_tensor(x) and _on_device(x))
    return tensors


def pointers(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors on the device that a launch is given, those of descriptors among them."""
    for x in tree_leaves(args):
        x = getattr(x, "base", x)
        if isinstance(x, DeviceTensor):
            yield x


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on the device, as torch's kernels take it."""
    with torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(torch.Tensor, x)
