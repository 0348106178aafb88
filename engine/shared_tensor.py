"""A tensor in memory that other processes can map."""

import os
from typing import NamedTuple

import torch


class Handle(NamedTuple):
    """Where a SharedTensor is, and which file that must be: a descriptor's number is soon another file's."""

    path: str
    device: int
    inode: int


class SharedTensor:
    """`tensor` [numel], zeros at first.

    The memory goes when the last process that maps it does. Linux only.
    """

    def __init__(self, numel: int, dtype: torch.dtype):
        self.fd = os.memfd_create("zerokl")
        os.ftruncate(self.fd, numel * dtype.itemsize)
        self.tensor = map_tensor(self.handle, numel, dtype)

    @property
    def handle(self) -> Handle:
        """For any process of the same user, while this object lives."""
        return self._handle(os.getpid())

    @property
    def inherited(self) -> Handle:
        """For a child process that was given `fd`, whatever becomes of this object."""
        return self._handle("self")

    def _handle(self, process: int | str) -> Handle:
        stat = os.fstat(self.fd)
        return Handle(f"/proc/{process}/fd/{self.fd}", stat.st_dev, stat.st_ino)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def map_tensor(handle: Handle, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a SharedTensor, in the same memory. Raises OSError when it is gone."""
    path, *identity = handle
    fd = os.open(path, os.O_RDWR)
    try:
        stat = os.fstat(fd)
        if [stat.st_dev, stat.st_ino] != identity or stat.st_size != numel * dtype.itemsize:
            raise OSError(f"shared memory: {path} is another file by now; its owner has closed it")
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=numel, dtype=dtype)
    finally:
        os.close(fd)
