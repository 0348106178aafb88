"""How every Triton kernel is launched: with pinned options and dense tensors. A launch can be recorded.

`enable_fp_fusion` is pinned on, because vLLM's kernels are launched with Triton's default. The default is on
up to Triton 3.9; Triton 3.10 changes it. Nothing is autotuned: each caller names num_warps, and num_stages
where a loop is pipelined.

Triton looks at every argument of every launch, to find the binary that is specialised on it. `launch` does so
only for the first launch of a kind. Later ones go to the binary itself, which takes a quarter off the host's
time of a pass (benchmarks/host_cost.py).
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
    """The state of `recorded_launches`: the launches so far, and whether they are carried out too."""

    launches: list[Launch]
    and_run: bool


class _Handle(NamedTuple):
    """A compiled binary, and the kernel's constants in the order of its parameters."""

    binary: Any
    constants: tuple[Any, ...]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)
# What Triton specialises on -> the binary. Triton keeps as many binaries itself.
_handles: dict[tuple[Any, ...], _Handle] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **options: Any) -> None:
    """kernel[grid](*args, ...) with the fusion of multiply and add pinned.

    The options may contain constexprs by name. All other parameters of the kernel are in `args`.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **options}
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, args, options))
        if not recording.and_run:
            return
    kind = kind_of(kernel, args, options)
    handle = _handles.get(kind)
    if handle is not None:
        handle.binary[grid + (1,) * (3 - len(grid))](*args, *handle.constants)
        return
    binary = kernel[grid](*args, **options)
    if binary is not None and torch.version.hip is None:  # an interpreter compiles nothing
        names = kernel.arg_names[len(args) :]
        _handles[kind] = _Handle(binary, tuple(options[name] for name in names))


def kind_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton may specialise a launch on. Launches of one kind have one binary."""
    # The kernel's function, as a hash of the kernel itself takes the host 0.4 microseconds.
    return (kernel.fn, *options, *options.values(), *map(_specialised, args))


def _specialised(x: Any) -> Any:
    """What Triton may specialise a binary on, of one argument. For AMD it looks at a tensor's size, too.

    Of a tensor that is its dtype and whether its address is a multiple of 16; of a whole number whether it is
    1, a multiple of 16, or too large for 32 bits.
    """
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0, x.device
    if type(x) is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    if hasattr(x, "block_shape"):  # a TensorDescriptor
        return x.base.dtype, *x.block_shape, x.base.device
    if isinstance(x, tuple):
        return tuple(map(_specialised, x))
    return type(x)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv, which can run in a kernel too, takes the host ten times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n. n is positive."""
    return 1 << (n - 1).bit_length()


@contextmanager
def recorded_launches(and_run: bool = False) -> Iterator[list[Launch]]:
    """List each launch that is made inside this context.

    A launch is carried out only with `and_run`. Without `and_run` the launchers can be called with meta
    tensors.
    """
    assert _recording.get() is None, "recorded_launches() does not nest"
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
