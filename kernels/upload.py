"""Small tensors of the host that go to a device together, by one copy.

A copy from ordinary memory makes the host wait for all that the device has been given before. So what a
forward and its backward read is packed into pinned memory, and nobody waits for its copy. torch gives pinned
memory to a next tensor only after the copies from it have ended. On a CPU nothing is copied.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

# Triton compiles a binary of its own for a pointer that is no multiple of so many bytes.
_ALIGN = 16


class Tables(Protocol):
    """Tensors that were made on the host, and that operations read on a device."""

    @property
    def host_tensors(self) -> Sequence[torch.Tensor]:
        """The tensors as they were made."""
        ...

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the `host_tensors` as they lie on `device`."""
        ...


def upload(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on `device`, those of the host by one copy. Nothing waits for the device."""
    from_host = [x for x in tensors if x.device.type == "cpu"] if device.type != "cpu" else []
    if not from_host:
        return tensors
    starts, end = [], 0
    for x in from_host:
        starts.append(end)
        end += -(-x.nbytes // _ALIGN) * _ALIGN
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for x, start in zip(from_host, starts, strict=True):
        # A tensor of one element is contiguous with any stride, and a clone of it has stride 1.
        dense = x.clone(memory_format=torch.contiguous_format).view(-1)
        packed[start : start + x.nbytes] = dense.view(torch.uint8).numpy()
    on_device = host.to(device, non_blocking=True)
    placed = iter(
        on_device[start : start + x.nbytes].view(x.dtype).view(x.shape)
        for x, start in zip(from_host, starts, strict=True)
    )
    return tuple(next(placed) if x.device.type == "cpu" else x for x in tensors)


def upload_tables(
    device: torch.device, tables: Sequence[Tables], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The tensors on `device`, as `upload`, and by the same copy what the tables hold."""
    if device.type == "cpu":
        return tensors
    host_tensors = [table.host_tensors for table in tables]
    placed = iter(upload(device, *tensors, *(x for group in host_tensors for x in group)))
    result = tuple(next(placed) for _ in tensors)
    for table, group in zip(tables, host_tensors, strict=True):
        table.arrived(device, [next(placed) for _ in group])
    return result
