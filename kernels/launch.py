"""How every Triton kernel is launched: with pinned options and dense tensors. A launch can be recorded.

`enable_fp_fusion` is pinned on, because vLLM's kernels are launched with Triton's default. The default is on
up to Triton 3.9; Triton 3.10 changes it. Nothing is autotuned: each caller names num_warps, and num_stages
where a loop is pipelined.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch of a jit function: all that Triton specialises it on. The grid is not part of it."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Recording(NamedTuple):
    """The state of `recorded`: the launches so far, and whether they are carried out too."""

    launches: list[Launch]
    and_run: bool


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **options: Any) -> None:
    """kernel[grid](*args, ...) with the fusion of multiply and add pinned.

    The options may contain constexprs by name.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **options}
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, args, options))
    if recording is None or recording.and_run:
        kernel[grid](*args, **options)


@contextmanager
def recorded(and_run: bool = False) -> Iterator[list[Launch]]:
    """List each launch that is made inside this context.

    A launch is carried out only with `and_run`. Without `and_run` the launchers can be called with meta
    tensors.
    """
    assert _recording.get() is None, "recorded() does not nest"
    token = _recording.set(_Recording([], and_run))
    try:
        yield _recording.get().launches
    finally:
        _recording.reset(token)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x if its last axis is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: torch.Tensor) -> torch.Tensor:
    """x if it is contiguous and begins at a multiple of 16 bytes, else a copy with these properties.

    Triton chooses its layouts, and so the order of a sum, by the alignment of pointers. But the bits of a row
    must not depend on the row's address.
    """
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
