"""A tensor in memory that several processes share."""

import os
from typing import NamedTuple

import torch


class Handle(NamedTuple):
    """The path of a SharedTensor's memory, and its device and inode.

    Device and inode identify the file, because its descriptor's number may soon belong to another file.
    """

    path: str
    device: int
    inode: int


class SharedTensor:
    """A `tensor` [numel] in shared memory, with zeros at first. Linux only.

    The memory is freed when the last process that maps it ends.
    """

    def __init__(self, numel: int, dtype: torch.dtype):
        self.fd = os.memfd_create("zerokl")
        os.ftruncate(self.fd, numel * dtype.itemsize)
        self.tensor = map_tensor(self.handle, numel, dtype)

    @property
    def handle(self) -> Handle:
        """The handle for any process of the same user. It is valid while this object lives."""
        return self._handle(os.getpid())

    @property
    def inherited(self) -> Handle:
        """The handle for a child process that got `fd`. It stays valid after this object is deleted."""
        return self._handle("self")

    def _handle(self, process: int | str) -> Handle:
        stat = os.fstat(self.fd)
        return Handle(f"/proc/{process}/fd/{self.fd}", stat.st_dev, stat.st_ino)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def map_tensor(handle: Handle, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a SharedTensor, in the same memory. Raises OSError when the memory is gone."""
    path, *identity = handle
    fd = os.open(path, os.O_RDWR)
    try:
        stat = os.fstat(fd)
        if [stat.st_dev, stat.st_ino] != identity or stat.st_size != numel * dtype.itemsize:
            raise OSError(f"shared memory: {path} is another file by now; its owner has closed it")
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=numel, dtype=dtype)
    finally:
        os.close(fd)
