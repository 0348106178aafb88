"""How every Triton kernel is launched: options pinned, tensors dense; and each launch can be recorded, so that all can be listed.

`enable_fp_fusion` is pinned on: vLLM's kernels are launched with Triton's default, which is on up to 3.9, and which 3.10 changes.
Nothing is autotuned: whoever launches names num_warps (and num_stages where a loop is pipelined).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_recorded: "list[Launch] | None" = None
_run_recorded = False


class Launch(NamedTuple):
    """One launch of a jit function: what Triton specialises it on, without the grid."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **options: Any) -> None:
    """kernel[grid](*args, ...) with the fusion of multiply and add pinned. Constexprs may be given by name among the options."""
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **options}
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, options))
    if _recorded is None or _run_recorded:
        kernel[grid](*args, **options)


@contextmanager
def recorded(and_run: bool = False) -> Iterator[list[Launch]]:
    """Inside it each launch is listed, and carried out only with `and_run`: without, launchers can be called with meta tensors."""
    global _recorded, _run_recorded
    assert _recorded is None, "recorded() does not nest"
    _recorded, _run_recorded = [], and_run
    try:
        yield _recorded
    finally:
        _recorded = None


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it that is contiguous and begins at a multiple of 16 bytes.

    Triton chooses its layouts, and with them the order of a sum, by the alignment of pointers; no row's bits may depend on where it lies.
    """
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
