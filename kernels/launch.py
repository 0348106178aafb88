"""How every Triton kernel is launched: options pinned, tensors dense; and each launch can be recorded, so
that all can be listed.

`enable_fp_fusion` is pinned on: vLLM's kernels are launched with Triton's default, which is on up to 3.9, and
which 3.10 changes. Nothing is autotuned: whoever launches names num_warps (and num_stages where a loop is
pipelined).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch of a jit function: what Triton specialises it on, without the grid."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Recording(NamedTuple):
    """What `recorded` is doing."""

    launches: list[Launch]
    and_run: bool


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **options: Any) -> None:
    """kernel[grid](*args, ...) with the fusion of multiply and add pinned.

    Constexprs may be given by name among the options.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **options}
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, args, options))
    if recording is None or recording.and_run:
        kernel[grid](*args, **options)


@contextmanager
def recorded(and_run: bool = False) -> Iterator[list[Launch]]:
    """Inside it each launch is listed, and carried out only with `and_run`:

    without, launchers can be called with meta tensors.
    """
    assert _recording.get() is None, "recorded() does not nest"
    token = _recording.set(_Recording([], and_run))
    try:
        yield _recording.get().launches
    finally:
        _recording.reset(token)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that is contiguous and begins at a multiple of 16 bytes.

    Triton chooses its layouts, and with them the order of a sum, by the alignment of pointers; no row's bits
    may depend on where it lies.
    """
    return (
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
