"""Triton's names where no Triton is needed: kernels are launched, and `launch` lists them and runs none.

Only the files kernels/*_triton.py import Triton. Inside `kernels_without_triton` they are imported anew, with
the few names that they need to be imported and to launch. Afterwards everything is as before.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import zerokl.kernels as kernels


class _Descriptor(NamedTuple):
    """TensorDescriptor: what a kernel reads through TMA."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]


def _jit(kernel: Callable | None = None, **options: Any) -> Callable:
    """triton.jit, with and without options: the function itself, which has the kernel's names."""
    if kernel is None:
        return _jit
    kernel.fn = kernel
    return kernel


def ragged_descriptor(x: torch.Tensor, block_shape: list[int]) -> _Descriptor:
    """create_ragged_descriptor of a matrix, number for number.

    The two dimensions before the matrix cancel out modulo 2^64 bytes, so that a box ends where a run of rows
    ends.
    """
    row, columns = x.stride(0), x.shape[1]
    shape, strides = [0x7FFF0000, 0x7FFF0000, 1 << 30, columns], [(1 << 34) - row, row, row, x.stride(1)]
    return _Descriptor(x, shape, strides, [1, 1, *block_shape])


_NAMES: dict[str, dict[str, Any]] = {
    "triton": {"jit": _jit, "__version__": "3.6.0"},
    "triton.language": {"constexpr": lambda value: value},
    "triton.language.extra": {"libdevice": None},
    "triton.tools": {},
    "triton.tools.tensor_descriptor": {"TensorDescriptor": _Descriptor},
    "triton.tools.ragged_tma": {"create_ragged_descriptor": ragged_descriptor, "load_ragged": None},
}


def _modules() -> dict[str, ModuleType]:
    modules = {name: ModuleType(name) for name in _NAMES}
    for name, module in modules.items():
        vars(module).update(_NAMES[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextmanager
def kernels_without_triton() -> Iterator[None]:
    """Inside, the launchers of kernels/ can be called without Triton."""
    names = [path.stem for path in sorted(Path(kernels.__path__[0]).glob("*_triton.py"))]
    assert len(names) > 15
    full_names = [f"{kernels.__name__}.{name}" for name in names]
    before = {name: sys.modules.pop(name) for name in full_names if name in sys.modules}
    triton = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "triton"}
    try:
        sys.modules |= _modules()
        try:
            for name in full_names:
                importlib.import_module(name)
        finally:
            for name in _NAMES:
                del sys.modules[name]
            sys.modules |= triton
        yield
    finally:
        for name, full_name in zip(names, full_names, strict=True):
            sys.modules.pop(full_name, None)
            vars(kernels).pop(name, None)
        sys.modules |= before
        for full_name, module in before.items():
            setattr(kernels, full_name.rpartition(".")[2], module)
