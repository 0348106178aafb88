"""Memory beside the device: what no kernel reads lies on the host or on a disk, and comes by slices.

Copies change no bit. Beside the device lie fp32 master weights and moments (engine/train/optimizer.py),
partial sums of the gradient (engine/train/parallel/gradient.py), the base of adapters (adapters.py) and the
inputs of layers that a backward computes again (decoder.py).

host: memory that is pinned where the device is a GPU. On a CPU it is the memory that the device has anyway,
and the same copies are made. disk: a mapped file without a name in the folder for temporary files (TMPDIR),
of which the system keeps in memory what there is room for. Its space is free when the process ends, however
it ends.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

Place = Literal["none", "host", "disk"]
# Elements on their way at once: 32 MiB in fp32, of which each copy is as fast as a longer one.
SLICE = 1 << 23
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


@dataclass(frozen=True)
class Offload:
    """Where such memory lies. none: on the device, where nothing is copied."""

    place: Place = "none"

    @property
    def away(self) -> bool:
        """Whether it lies beside the device."""
        return self.place != "none"

    def empty(self, n: int, device: torch.device | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory [n] for what `device` computes with. Raises ValueError where there is no room."""
        if not self.away:
            return torch.empty(n, dtype=dtype, device=device)
        if self.place == "disk" and n:
            return _mapped(n, dtype)
        if n and device is not None and device.type == "cuda":
            return torch.frombuffer(_Pinned(n * dtype.itemsize), dtype=dtype)
        return torch.empty(n, dtype=dtype)

    def copied(self, x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A copy of x [n] in such memory, rounded once to `dtype`."""
        return self.empty(len(x), device, dtype).copy_(x)

    def slices(self, n: int, here: int | None = None) -> Iterator[slice]:
        """The parts of n elements that are on the device at once.

        here: of so many, if they lie there; None is all of them.
        """
        length = SLICE if self.away else max(here or n, 1)
        return (slice(start, min(start + length, n)) for start in range(0, n, length))

    @contextmanager
    def brought(self, device: torch.device, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors on the device. What is changed inside this context is brought back at its end."""
        copies = tuple(x.to(device, copy=True) for x in tensors) if self.away else tensors
        yield copies
        for x, changed in zip(tensors, copies, strict=True):
            if self.away:
                x.copy_(changed)

    def keeping(self) -> AbstractContextManager[object]:
        """Inside this context, what autograd keeps for a backward is moved here until the backward asks."""
        if not self.away:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.device, torch.Size]:
        # Both copies are in the order of the device's stream. torch's pinned memory, which a next pass uses
        # again, is free after the copies from it.
        if self.place == "host" and x.is_cuda:
            kept = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        else:
            kept = self.empty(x.numel(), x.device, x.dtype)
        return kept.copy_(x.detach().reshape(-1), non_blocking=True), x.device, x.shape


def _unpack(packed: tuple[torch.Tensor, torch.device, torch.Size]) -> torch.Tensor:
    kept, device, shape = packed
    return kept.to(device, non_blocking=True, copy=True).view(shape)


HERE = Offload()


class _Pinned(mmap.mmap):
    """Zeroed memory of the host that a GPU copies from and to by itself.

    torch's own pinned memory has a power of two of bytes: nearly twice as much as a large tensor needs.
    """

    def __new__(cls, n_bytes: int):
        memory = super().__new__(cls, -1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if torch.cuda.cudart().cudaHostRegister(memory.address, n_bytes, _PORTABLE) != 0:
            memory.address = None
            raise ValueError(
                f'memory.offload ("host"): {n_bytes} bytes of the host could not be pinned; give the process '
                'more memory (ulimit -l), or set memory.offload = "disk"'
            )
        return memory

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _mapped(n: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [n] of zeros in a file without a name. Raises ValueError where the disk has no room."""
    n_bytes = n * dtype.itemsize
    with tempfile.TemporaryFile() as file:
        try:
            # A disk that is full later would end the process in the middle of a copy.
            reserve = getattr(os, "posix_fallocate", None)  # macOS has none
            reserve(file.fileno(), 0, n_bytes) if reserve else os.ftruncate(file.fileno(), n_bytes)
        except OSError as error:
            raise ValueError(
                f'memory.offload ("disk"): {tempfile.gettempdir()} has no room for {n_bytes} bytes more '
                f"({error.strerror}); let TMPDIR name a folder on a larger disk"
            ) from None
        return torch.frombuffer(mmap.mmap(file.fileno(), n_bytes), dtype=dtype)
