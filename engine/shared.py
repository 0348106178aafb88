"""A tensor in memory that other processes can map."""

import os

import torch


class SharedTensor:
    """`tensor` [numel], zeros at first. The memory goes when the last process that maps it does. Linux only."""

    def __init__(self, numel: int, dtype: torch.dtype):
        self._fd = os.memfd_create("zerokl")
        os.ftruncate(self._fd, numel * dtype.itemsize)
        self.tensor = map_tensor(self.path, numel, dtype)

    @property
    def path(self) -> str:
        """A file that processes of the same user can map while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def map_tensor(path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a SharedTensor at `path`, in the same memory."""
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
