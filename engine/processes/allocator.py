"""What glibc does with the memory that a step has freed. Without glibc nothing here has an effect."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Keep it for the next step: blocks of up to 32 MB, which is glibc's limit, and 64 MB at the heap's top.

    glibc would otherwise give the memory back, and the kernel would zero it again (benchmarks/LOG.md).
    """
    _set(mmap_threshold=32 << 20, trim_threshold=64 << 20)


def return_freed_memory() -> None:
    """Give every block of 128 KB or more back at once.

    Where weights are sharded, blocks of many sizes come and go. What a heap keeps of them fits no later one,
    and has been as large as all else (docs/scale.md).
    """
    _set(mmap_threshold=128 << 10, trim_threshold=128 << 10)


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)
